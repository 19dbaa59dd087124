"""Export: the leaves of a state one by one, each gathered on its own, to one rank or to all of them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fshard.arguments import described, expect
from fshard.errors import PlanError
from fshard.interchange.parcels import ROLE, Parcel, fetch, pack
from fshard.interchange.rename import RenameLike
from fshard.runtime.comm import mesh_lane, raise_failures
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry, entries
from fshard.state.train_state import TrainState

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
    """Stream a state leaf by leaf, gathered: to push weights to an inference engine, or to write them somewhere.

    Collective: every rank calls it alike and goes through the whole stream, also where it receives nothing. Beside what
    the caller keeps, a rank holds one leaf and a slab of at most 16 MiB; one that receives nothing holds a slab.

    A leaf comes out as units read it: gathered over the axes over which compute gathers it, and local on all others. So
    experts, and slices of tensor parallelism, stay where they are: each rank gets its own, under the same name. Name
    axes in ``axes=`` to gather over these too, or say ``"all"`` for whole leaves.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``.
        plan: the plan of a tree.
        what: ``"params"``; ``"opt_state"``, whose names begin with the buffer's, as ``exp_avg.blocks.0.weight``; or
            ``"state"``, which is both, as ``params.blocks.0.weight`` and ``opt.exp_avg.blocks.0.weight``.
        to: the rank that gets the leaves; None for all of them. Of a leaf that stays local on an axis, each rank
            along that axis has a block of its own, and it goes to the one that is otherwise where ``to`` is.
        axes: axes over which leaves are gathered although compute leaves them local, or ``"all"``.
        dtype: what floating-point leaves are cast to before they travel; None for none.
        rename: rules from paths to names, ``fs.Rename`` or ``(pattern, name)``; None for a name leaves it out.
        callback: called with each name and tensor instead. If it raises on one rank, the others go through the
            stream without it, and all ranks raise at its end.

    Returns:
        An iterator over ``(name, tensor)``, in the order of the tree; the tensor has memory of its own. With
        ``callback`` None, when all is done.

    Raises:
        PlanError: an argument that cannot be, or an abstract mesh.
        TreeError: a tree that is not the plan's.
        CheckpointError: ranks called it with different arguments.
        PeerError: the callback failed on another rank.

    >>> import fshard as fs
    >>> params = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    >>> [(name, tuple(leaf.shape)) for name, leaf in fs.export(fs.shard(params, plan), plan)]
    [('w', (2, 3)), ('b', (3,))]
    """
    expect("export(state)", [("callback", callback, (Callable, type(None)), "a function (name, tensor), or None")])
    plan, listed, alive = listing(state, plan, what)
    parcels = pack(plan, listed, to=to, axes=axes, dtype=dtype, rename=rename)
    if callback is None:
        return _stream(plan, parcels, alive)
    deliver(plan, parcels, callback, alive)
    return None


def deliver(plan: Plan, parcels: Sequence[Parcel], callback: Callback, alive: Callable[[], object]) -> None:
    """Go through a stream; a callback that raises makes all ranks raise, at its end."""
    failure: BaseException | None = None
    for parcel in parcels:
        alive()
        tensor = fetch(plan.mesh, parcel)
        if tensor is not None and failure is None:
            try:
                callback(parcel.name, tensor)
            except BaseException as error:  # Ctrl-C too: the other ranks are waiting for this one's part
                failure = error
    raise_failures(mesh_lane(plan.mesh, ROLE), failure, "export failed on other ranks:", "The state is as it was.")


def _stream(plan: Plan, parcels: Sequence[Parcel], alive: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    for parcel in parcels:
        alive()
        tensor = fetch(plan.mesh, parcel)
        if tensor is not None:
            yield parcel.name, tensor


def listing(
    state: TrainState | Mapping[str, Any], plan: Plan | None, what: What
) -> tuple[Plan, list[Entry], Callable[[], object]]:
    """The plan, the entries to export under the names that they will have, and what raises once they are donated.

    Raises:
        PlanError: an argument that cannot be.
        TreeError: a tree that is not the plan's.
    """
    if what not in ("params", "opt_state", "state"):
        raise PlanError(f"what={what!r} must be 'params', 'opt_state' or 'state'")
    if isinstance(state, TrainState):
        if plan is not None:
            state.check_plan(plan)
        found = entries(state)
        if what == "state":
            return state.plan, found, state.shards
        kind = "params." if what == "params" else "opt."
        listed = [dataclasses.replace(e, name=e.name.removeprefix(kind)) for e in found if e.name.startswith(kind)]
        return state.plan, listed, state.shards
    if plan is None or what != "params":
        raise PlanError(
            f"{described(state)} is no state: give plan= with a tree of parameters, and a state for all else"
        )
    flat = plan.check_tree(state, whole=False)
    return plan, [param_entry(plan, path, tensor) for path, tensor in flat.items()], lambda: None


def param_entry(plan: Plan, path: str, tensor: Tensor) -> Entry:
    """The entry of one leaf of a tree of local tensors, under its bare path."""
    group, number = plan.places()[path]
    leaf, mesh = group.leaves[number], plan.mesh
    others = tuple(axis for axis in mesh.axis_names if axis not in leaf.at_rest.axes)
    flat = tensor.detach().reshape(-1)
    return Entry(path, leaf.shape, group.piece(number, mesh), flat, mesh.ranks(others), leaf.at_rest)
