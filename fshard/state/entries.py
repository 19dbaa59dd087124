"""The entries of a train state: what a checkpoint must hold, as data, and a state from entries that were filled.

Whoever writes, reads, converts or compares states works on entries and needs to know nothing of groups, shards or
optimizers. Whoever adds a piece of state adds it here: tensors in ``entries``, plain numbers in ``scalars``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import StateError, TreeError
from fshard.optim.base import Optimizer
from fshard.optim.form import Form
from fshard.optim.scaling import Scale
from fshard.runtime.execution import Shard, Shards, start_shard
from fshard.runtime.memory import memory_space
from fshard.sharding.layout import Group, Piece
from fshard.sharding.plan import Plan
from fshard.sharding.spec import P, Shape
from fshard.state.fit import check_optimizer
from fshard.state.memory import Memory
from fshard.state.past import Past
from fshard.state.train_state import TrainState

LATE = "late."
"""What the names of scalars begin with that tell when a leaf began to train."""

CARRIED = "carried_count"
"""The name of the number of elements whose gradients ``fs.optim.every`` carries as a sum. Older states have ``count``
instead, and carry that sum over a number of parts that they do not hold."""

Scalars = dict[str, int | float | bool | str | None]
"""What a state holds beside tensors, equal on all ranks."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a train state: what it is called, how large it is as a whole, and the part that this rank holds.

    Attributes:
        name: ``params.`` or ``opt.exp_avg.`` and the path of the leaf: ``params.blocks.0.weight``.
        shape: of the whole tensor, over all ranks.
        piece: this rank's part: elements ``start`` to ``stop``, row-major, of a box in the whole tensor.
        tensor: that part, 1-D, ``piece.numel`` elements, in the state's own memory: what is written to it is in the
            state.
        holders: the ranks that hold this very piece, this one among them, in the same order on all of them.
        spec: how the tensor is cut over the mesh, for people to read.
    """

    name: str
    shape: Shape
    piece: Piece
    tensor: Tensor
    holders: tuple[int, ...]
    spec: P

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype


def entries(state: TrainState) -> list[Entry]:
    """The entries of a state as this rank holds it: parameters in the order of the tree, then the optimizer's state.

    Local. Every rank lists the same names in the same order. An update that waits is applied first.

    Raises:
        DonatedError: the state was donated to a step.
        StateError: other ranks have updated some of its parameters, and it was not settled.
        TreeError: the optimizer keeps something that no entry can describe.
    """
    shards, plan = state.finished(), state.plan
    places = plan.places()
    out = [_entry(plan, f"params.{path}", *places[path], shards[places[path][0].id].param) for path in plan.leaves]
    names = dict.fromkeys(name for shard in shards for name in shard.opt)
    return out + [entry for name in names for entry in _opt_entries(plan, name, shards)]


def gradients(plan: Plan, buffers: Mapping[int, Tensor]) -> list[Entry]:
    """The entries of gradients, which lie as the optimizer's plain buffers do, by group id."""
    places = [(path, group, number) for path, (group, number) in _ordered(plan) if group.id in buffers]
    return [_entry(plan, f"grad.{path}", group.owned, number, buffers[group.id]) for path, group, number in places]


def scalars(state: TrainState) -> Scalars:
    """What a state holds beside tensors: step, seed, loss scale, what is carried, and who began late."""
    out: Scalars = {"step": state.step, "seed": state.seed}
    if state.count:
        out |= {CARRIED: state.count}
    out |= {LATE + path: late for path, late in state.late.items()}
    return out if state.scale is None else out | {"loss_scale": state.scale.value, "loss_scale_good": state.scale.good}


def assemble(
    plan: Plan,
    opt: Optimizer | None,
    fill: Callable[[Entry], None],
    values: Mapping[str, Any],
    past: Past | None = None,
) -> TrainState:
    """A state from its entries: the inverse of ``entries`` and ``scalars``. Local.

    Args:
        plan: where leaves live.
        opt: the optimizer, which says what it keeps; None for parameters alone.
        fill: called with each entry in turn, writes to ``entry.tensor``. What it leaves alone stays as ``opt.init``
            made it, and zero in parameters.
        values: as ``scalars`` gave them.
        past: where it comes from.

    Raises:
        StateError: gradients are carried in units that only the run that saved them knew.
    """
    if values.get("count"):
        raise _unknown_units(int(values["step"]))
    made = None if opt is None else check_optimizer(plan, opt)
    shards = []
    for group in plan.groups:
        shards.append(Shard(memory_space(group.kinds.param, plan.mesh).zeros(group.chunk, group.dtype), {}))
    for entry in entries(TrainState(plan, 0, 0, Memory(plan, Shards(shards)))):
        fill(entry)
    if made is not None:
        # What starts from the parameters, such as an average of them, starts from these.
        shards = [start_shard(group, plan.mesh, made, shards[group.id].param) for group in plan.groups]
    scale, count = None, float(values.get(CARRIED, 0.0))
    if values.get("loss_scale") is not None:
        scale = Scale(float(values["loss_scale"]), int(values.get("loss_scale_good", 0)))
    trained = [path for path, leaf in plan.leaves.items() if leaf.trainable and opt is not None]
    late = {path: int(values[LATE + path]) for path in trained if values.get(LATE + path)}
    memory, past = Memory(plan, Shards(shards)), past or Past()
    state = TrainState(plan, int(values["step"]), int(values["seed"]), memory, scale, count, late, past)
    for entry in entries(state)[len(plan.leaves) :]:
        fill(entry)
    return state


def _unknown_units(step: int) -> StateError:
    """A state of a version whose carried gradients depend on ranks and microbatches."""
    return StateError(
        f"the state of step {step} carries gradients of fs.Mean between two updates of fs.optim.every, as older "
        f"versions saved them: divided by data ranks times accumulate=, which are not known here. Restore a checkpoint "
        f"of a step that has updated, or make the next update with the version that saved it"
    )


def _opt_entries(plan: Plan, name: str, shards: list[Shard]) -> Iterator[Entry]:
    """The entries of one of the optimizer's buffers."""
    for path, (group, number) in _ordered(plan):
        layout = shards[group.id].layouts.get(name)
        if layout is None or number not in layout.ranges:
            continue
        group = group.owned
        buffer = shards[group.id].opt[name]
        if buffer.shape != (layout.length,):
            raise TreeError(
                f"the optimizer's {name!r} of group {group.name!r} is {list(buffer.shape)} and should be "
                f"{[layout.length]}: make the state with fs.init_state(plan, opt, ...)"
            )
        entry = _entry(plan, f"opt.{name}.{path}", group, number, buffer)
        if layout.plain:
            yield entry
            continue
        if layout.forms[number].shape is not None and 0 in entry.shape:
            continue  # a leaf without elements is on no rank, and nor is what an optimizer keeps of it as a whole
        begin, end = layout.ranges[number]
        shape = layout.forms[number].whole(entry.shape)
        piece = _state_piece(layout.forms[number], shape, entry.piece, end - begin)
        holders = entry.holders if layout.forms[number].shape is None else _alike(plan, group, number)
        yield replace(entry, shape=shape, piece=piece, tensor=buffer[begin:end].detach(), holders=holders)


def _state_piece(form: Form, shape: Shape, piece: Piece, count: int) -> Piece:
    """The part of one of an optimizer's tensors that goes with a piece of its leaf."""
    if form.shape is not None:  # whole on every rank that holds some of the leaf
        return Piece((0,) * len(shape), shape, 0, count)
    if form.block == 1:
        return piece
    first = piece.start // form.block
    return Piece((0,), shape, first, first + count)


def _alike(plan: Plan, group: Group, number: int) -> tuple[int, ...]:
    """The ranks that hold some of a leaf, as this one does, or none, as it does."""
    some = [group.piece(number, plan.mesh, rank).numel > 0 for rank in range(plan.mesh.size)]
    return tuple(rank for rank, holds in enumerate(some) if holds == some[plan.mesh.rank])


def _ordered(plan: Plan) -> Iterator[tuple[str, tuple[Group, int]]]:
    """The place of each leaf, in the order of the tree."""
    places = plan.places()
    return ((path, places[path]) for path in plan.leaves)


def _entry(plan: Plan, name: str, group: Group, number: int, buffer: Tensor) -> Entry:
    """The entry of one leaf, in a buffer that is laid out as its group's shard."""
    leaf, mesh = group.leaves[number], plan.mesh
    begin, end = group.shard_range(number, mesh.index(group.gather_axes))
    others = tuple(axis for axis in mesh.axis_names if axis not in leaf.at_rest.axes)
    piece = group.piece(number, mesh)
    return Entry(name, leaf.shape, piece, buffer[begin:end].detach(), mesh.ranks(others), leaf.at_rest)
