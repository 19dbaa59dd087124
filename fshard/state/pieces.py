"""The tensors of a rank as entries: what each is called, its whole size, and which part of it the rank holds."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fshard.errors import TreeError
from fshard.optim.form import Form
from fshard.runtime.execution import Shard
from fshard.runtime.memory import packed_parts, values_of
from fshard.runtime.memory.optimizer_layout import BASIS, RESIDUAL
from fshard.sharding.layout import Group, Piece
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import P, Shape
from fshard.sharding.wire import WireFormat

PARAMS = "params."
"""How the names of entries of parameters begin."""


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
        common: whether replicas that train apart hold equal copies of it; see ``state/replica_entries.py``.
        rows: what the rows of dim 0 are: ``"sum"``, of replicas, whose sum is what counts; ``"any"``, of shards, of
            which each can begin with any; empty where there are none.
    """

    name: str
    shape: Shape
    piece: Piece
    tensor: Tensor
    holders: tuple[int, ...]
    spec: P
    common: bool = False
    rows: Literal["", "sum", "any"] = ""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype


def entries_of(plan: Plan, shards: Sequence[Shard], unpacked: Container[str] = ()) -> list[Entry]:
    """The entries of the shards of a plan: parameters in the order of the tree, then the optimizer's state. Local.

    Args:
        shards: of all groups.
        unpacked: paths of packed leaves of which copies of their values are listed, and not codes and scales.

    Raises:
        TreeError: the optimizer keeps something that no entry can describe.
    """
    out, values = list[Entry](), dict[int, Tensor]()
    for path, (group, number) in _ordered(plan):
        name, shard = PARAMS + path, shards[group.id].param
        if group.packed is None:
            out.append(_entry(plan, name, group, number, shard))
        elif path in unpacked:
            if group.id not in values:
                values[group.id] = values_of(group, shard)
            out.append(_entry(plan, name, group, number, values[group.id]))
        else:
            out += _packed_entries(plan, name, group, number, shard)
    names = dict.fromkeys(name for shard in shards for name in shard.opt)
    out += [entry for name in names for entry in _opt_entries(plan, name, shards)]
    return out if plan.whole is None else [_of_all_stages(entry, plan, plan.whole) for entry in out]


def _of_all_stages(entry: Entry, plan: Plan, whole: Plan) -> Entry:
    """The entry of a plan of some stages with its holders as ranks of the mesh of all stages."""
    stages = whole.stages
    assert stages is not None
    if entry.name.startswith(PARAMS):
        path = entry.name.removeprefix(PARAMS).split(":")[0]
    else:
        path = split_name(entry.name, plan.leaves)[1]
    ranks = [whole.mesh.ranks(stages.axis, plan.mesh.members[rank]) for rank in entry.holders]
    held = [along[position] for along in ranks for position in stages.positions(path)]
    return replace(entry, holders=tuple(sorted(held)))


def packed_names(path: str, form: WireFormat | None) -> tuple[str, ...]:
    """The names of the two entries of a packed leaf: of its codes, and of their scales.

    >>> packed_names("head.weight", WireFormat("nf4", 64))
    ('params.head.weight:nf4/64', 'params.head.weight:nf4/64:scales')
    """
    return () if form is None else (f"{PARAMS}{path}:{form}", f"{PARAMS}{path}:{form}:scales")


def gradients(plan: Plan, buffers: Mapping[int, Tensor]) -> list[Entry]:
    """The entries of gradients, which lie as the optimizer's plain buffers do, by group id."""
    places = [(path, group, number) for path, (group, number) in _ordered(plan) if group.id in buffers]
    return [_entry(plan, f"grad.{path}", group.owned, number, buffers[group.id]) for path, group, number in places]


def _packed_entries(plan: Plan, name: str, group: Group, number: int, shard: Tensor) -> list[Entry]:
    """The codes and the scales of a packed leaf. Both are 1-D, so any mesh can hold parts of them."""
    form, leaf = group.packed, group.leaves[number]
    assert form is not None
    plain, names = _entry(plan, name, group, number, shard[:0]), packed_names(leaf.path, form)
    first, stop, end = (-(-at // form.block) for at in (plain.piece.start, plain.piece.stop, leaf.numel))
    out, parts = [], packed_parts(group, shard, *group.shard_range(number, plan.mesh.index(group.gather_axes)))
    for name, tensor, width in zip(names, parts, (form.payload(form.block), 1), strict=True):
        piece = Piece((0,), (end * width,), first * width, stop * width)
        out.append(replace(plain, name=name, shape=piece.shape, piece=piece, tensor=tensor.detach()))
    return out


def _opt_entries(plan: Plan, name: str, shards: Sequence[Shard]) -> Iterator[Entry]:
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
        entry = replace(_entry(plan, f"opt.{name}.{path}", group, number, buffer), common=layout.forms[number].common)
        if layout.plain:
            yield entry if name != RESIDUAL else row_of(entry, plan.mesh, group.rest_axes, "sum")
            continue
        if layout.forms[number].shape is not None and 0 in entry.shape:
            continue  # a leaf without elements is on no rank, and nor is what an optimizer keeps of it as a whole
        begin, end = layout.ranges[number]
        shape = layout.forms[number].whole(entry.shape)
        piece = _state_piece(layout.forms[number], shape, entry.piece, end - begin)
        holders = entry.holders if layout.forms[number].shape is None else _alike(plan, group, number)
        entry = replace(entry, shape=shape, piece=piece, tensor=buffer[begin:end].detach())
        if name == BASIS:
            yield row_of(replace(entry, spec=P()), plan.mesh, group.gather_axes, "any")
        else:
            yield replace(entry, holders=holders)


def row_of(entry: Entry, mesh: Mesh, axes: Axes, rows: Literal["sum", "any"]) -> Entry:
    """The entry of what ranks have for themselves along some axes, as a row of those of all."""
    piece = replace(entry.piece, offset=(mesh.index(axes), *entry.piece.offset), shape=(1, *entry.piece.shape))
    holders = tuple(rank for rank in entry.holders if mesh.index(axes, rank) == mesh.index(axes))
    spec = P(axes if len(axes) > 1 else axes[0] if axes else None, *entry.spec.dims, flat=entry.spec.flat)
    shape = (mesh.axis_size(axes), *entry.shape)
    return replace(entry, shape=shape, piece=piece, holders=holders, spec=spec, rows=rows)


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
    values, frozen = buffer[begin:end].detach(), not leaf.trainable
    return Entry(name, leaf.shape, piece, values, mesh.ranks(others), leaf.at_rest, frozen)


def split_name(name: str, leaves: Container[str]) -> tuple[str, str]:
    """The buffer and the leaf of an optimizer's entry, ``opt.exp_avg.blocks.0.weight`` with or without ``opt``.

    >>> split_name("opt.exp_avg.blocks.0.weight", {"blocks.0.weight", "weight"})
    ('exp_avg', 'blocks.0.weight')
    """
    parts = name.removeprefix("opt.").split(".")
    cut = next((at for at in range(1, len(parts)) if ".".join(parts[at:]) in leaves), len(parts))
    return ".".join(parts[:cut]), ".".join(parts[cut:])
