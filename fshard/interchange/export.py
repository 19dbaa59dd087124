"""Export: the leaves of a state one by one, each gathered on its own, to one rank or to all ranks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from fshard.arguments import described, expect
from fshard.errors import PlanError, TreeError, lines
from fshard.interchange.export_plan import ROLE, ExportItem, fetch, plan_export
from fshard.interchange.rename import RenameLike
from fshard.runtime.comm import collective_call, mesh_communicator, raise_failures
from fshard.runtime.comm.copies import Copy, unequal_copies
from fshard.sharding.mesh import Axes
from fshard.sharding.part_mesh import ReplicaMesh
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.entries import entries
from fshard.state.pieces import Entry
from fshard.state.settle import settle
from fshard.state.train_state import TrainState

T = TypeVar("T")
What = Literal["params", "opt_state", "state"]
Callback = Callable[[str, Tensor], object]


@overload
def export(
    state: TrainState | Mapping[str, Any],
    plan: Plan | None = ...,
    *,
    what: What = ...,
    to: int | None = ...,
    axes: Axes | Literal["all"] = ...,
    dtype: torch.dtype | None = ...,
    rename: Sequence[RenameLike] = ...,
    callback: None = ...,
) -> Iterator[tuple[str, Tensor]]: ...


@overload
def export(
    state: TrainState | Mapping[str, Any],
    plan: Plan | None = ...,
    *,
    what: What = ...,
    to: int | None = ...,
    axes: Axes | Literal["all"] = ...,
    dtype: torch.dtype | None = ...,
    rename: Sequence[RenameLike] = ...,
    callback: Callback,
) -> None: ...


@collective_call
def export(
    state: TrainState | Mapping[str, Any],
    plan: Plan | None = None,
    *,
    what: What = "params",
    to: int | None = None,
    axes: Axes | Literal["all"] = (),
    dtype: torch.dtype | None = None,
    rename: Sequence[RenameLike] = (),
    callback: Callback | None = None,
) -> Iterator[tuple[str, Tensor]] | None:
    """Stream a state leaf by leaf, gathered: to send weights to an inference engine, or to write them. Collective.

    Every rank makes the same call and iterates over the whole stream, even if it receives nothing. Beside what the
    caller keeps, a receiving rank holds one leaf and a slab of at most 16 MiB; any other rank holds a slab.

    Leaves arrive as units read them: gathered over the axes over which compute gathers them, and local on all other
    axes. So experts, and slices of tensor parallelism, are not gathered: each rank receives its own under the same
    name. Name axes in ``axes=`` to gather over these too, or pass ``"all"`` for whole leaves.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``.
        plan: the plan of a tree.
        what: ``"params"``; ``"opt_state"``, with names such as ``exp_avg.blocks.0.weight``; or ``"state"`` for both,
            with names such as ``params.blocks.0.weight`` and ``opt.exp_avg.blocks.0.weight``.
        to: the rank that receives the leaves; None for all ranks. If a leaf stays local on an axis, each block along
            that axis goes to the rank that has the coordinates of ``to`` on all other axes.
        axes: axes over which leaves are gathered although compute leaves them local, or ``"all"``.
        dtype: the dtype to which floating-point leaves are cast before they are sent; None for no cast.
        rename: rules from paths to names, ``fs.io.Rename`` or ``(pattern, name)``; the name None leaves a leaf out.
        callback: a function that is called with each name and tensor. If it raises on one rank, the other ranks
            finish the stream, and all ranks raise at its end.

    Returns:
        An iterator over ``(name, tensor)`` in the order of the tree; each tensor has its own memory. With
        ``callback``, None at the end of the stream.

    Raises:
        PlanError: an invalid argument, or an abstract mesh.
        TreeError: a tree that does not fit the plan.
        CheckpointError: ranks passed different arguments.
        PeerError: the callback failed on another rank.

    >>> params = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> [(name, tuple(leaf.shape)) for name, leaf in fs.io.export(fs.shard(params, plan), plan)]
    [('w', (2, 3)), ('b', (3,))]
    """
    expect("export(state)", [("callback", callback, (Callable, type(None)), "a function (name, tensor), or None")])
    plan, listed, check_alive = export_entries(state, plan, what)
    items = plan_export(plan, listed, to=to, axes=axes, dtype=dtype, rename=rename)
    if callback is None:
        return (pair for pair in stream(items, check_alive) if pair is not None)
    deliver_all(plan, stream(items, check_alive), lambda pair: callback(*pair))
    return None


def deliver_all(plan: Plan, arrivals: Iterable[T | None], callback: Callable[[T], object]) -> None:
    """Call a function with all that this rank receives. Collective; a failure on any rank is raised on all."""
    failure = deliver(arrivals, callback)
    comm = mesh_communicator(plan.mesh, ROLE)
    raise_failures(comm, failure, "export failed on other ranks:", "The state is as it was.")


def on_one_replica(plan: Plan, listed: Sequence[Entry], call: str, write: Callable[[], object]) -> None:
    """Write what replicas that train apart (``fs.outer``) hold alike, by the first of them. Collective on all of them.

    Without such replicas it calls ``write`` on all ranks, and that is all.

    Args:
        plan: the plan; that of a replica, where these train apart.
        listed: what is written.
        call: the name of the function, for errors.
        write: what writes, collective within a replica.

    Raises:
        TreeError: replicas hold different values; on all of them, before anything is written.
        PeerError: writing failed on another rank.
    """
    mesh = plan.mesh
    if not isinstance(mesh, ReplicaMesh):
        write()
        return
    comm, failure = mesh_communicator(mesh.whole, ROLE), None
    copies = [Copy(e.name, mesh.everyone(e.holders), e.tensor, True, e.piece.start) for e in listed]
    if found := unequal_copies(comm, copies):
        raise TreeError(
            lines(
                f"{call}: replicas train apart and hold different values of {len(found)} of {len(listed)} tensors:",
                [name for name, _ in found],
                f"Give what they agree on: {call}(fs.averaged(state, 'anchor'), ...).",
            )
        )
    try:
        if mesh.replica == 0:
            write()
    except BaseException as error:  # also Ctrl-C: the other replicas wait for this one
        failure = error
    raise_failures(comm, failure, f"{call} failed on other ranks:", "The state is as it was.")


def deliver(arrivals: Iterable[T | None], callback: Callable[[T], object]) -> BaseException | None:
    """Call a function with each thing that this rank receives, until it fails; returns its failure. Collective."""
    failure: BaseException | None = None
    for arrival in arrivals:
        if arrival is not None and failure is None:
            try:
                callback(arrival)
            except BaseException as error:  # also Ctrl-C: the other ranks wait for this rank's part of the stream
                failure = error
    return failure


def stream(items: Sequence[ExportItem], check_alive: Callable[[], object]) -> Iterator[tuple[str, Tensor] | None]:
    """The exported names with their leaves; None for each that this rank does not receive."""
    for item in items:
        check_alive()
        leaf = fetch(item)
        yield None if leaf is None else (item.name, leaf)


def export_entries(
    state: TrainState | Mapping[str, Any], plan: Plan | None, what: What
) -> tuple[Plan, list[Entry], Callable[[], object]]:
    """The plan, the entries to export under their exported names, and a function that raises if they were donated."""
    if what not in ("params", "opt_state", "state"):
        raise PlanError(f"what={what!r} must be 'params', 'opt_state' or 'state'")
    refuse_stages("this export", state.plan if isinstance(state, TrainState) else plan)
    if isinstance(state, TrainState):
        if plan is not None:
            state.check_plan(plan)
        found = entries(settle(state), state.plan.leaves)
        if what == "state":
            return state.plan, found, state.shards
        kind = "params." if what == "params" else "opt."
        listed = [dataclasses.replace(e, name=e.name.removeprefix(kind)) for e in found if e.name.startswith(kind)]
        return state.plan, listed, state.shards
    if plan is None or what != "params":
        raise PlanError(
            f"{described(state)} is not a state: give plan= with a tree of parameters, and a state for all else"
        )
    expect("a tree of parameters (params, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    listed, mesh = [], plan.mesh
    for path, tensor in plan.check_tree(state, whole=False).items():
        (group, number), leaf = plan.places()[path], plan.leaves[path]
        holders = mesh.ranks(tuple(axis for axis in mesh.axis_names if axis not in leaf.at_rest.axes))
        flat = tensor.detach().reshape(-1)
        listed.append(Entry(path, leaf.shape, group.piece(number, mesh), flat, holders, leaf.at_rest))
    return plan, listed, lambda: None
