"""Parcels: what is to be exported of each leaf, from whom to whom, and fetching it.

A leaf travels in slabs of bounded size, so that beside the leaf itself a rank holds a slab and no more. Who holds what
is exchanged once, as numbers, at the start: so whatever has an entry can be exported, whatever its layout.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.collectives.group import Group as Ranks
from fshard.errors import CheckpointError, PlanError, TreeError, lines, no_processes, unknown_axis
from fshard.interchange.moments import split_name
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.interchange.transfer import positions, transfer
from fshard.runtime.clock import marks
from fshard.runtime.comm import all_ranks_or_raise, enter, exchange, mesh_lane
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.entries import Entry

ROLE = "interchange"
"""The lane on which ranks tell each other what they want and how it went."""

SLAB = 16 << 20
"""Bytes of a leaf that are gathered at a time."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """One leaf that is to be exported.

    Attributes:
        name: what it will be called.
        entry: what this rank holds of it.
        axes: the axes over which it is gathered.
        have: the piece of each rank along them, in ascending order of rank.
        root: the position of the one that gets it; None if all of them do.
        takes_part: whether this rank is among those that send or receive.
        dtype: in which it comes out.
        transpose: whether its dims change places.
    """

    name: str
    entry: Entry
    axes: Axes
    have: tuple[Piece, ...]
    root: int | None
    takes_part: bool
    dtype: torch.dtype
    transpose: bool

    @property
    def block(self) -> tuple[Shape, Shape]:
        """What comes out: the offset and shape of the box of the whole leaf that these ranks hold together."""
        dims = range(len(self.entry.shape))
        low = tuple(min(piece.offset[d] for piece in self.have) for d in dims)
        high = [max(piece.offset[d] + piece.shape[d] for piece in self.have) for d in dims]
        return low, tuple(b - a for a, b in zip(low, high, strict=True))

    @property
    def shape(self) -> Shape:
        """The shape of what comes out."""
        shape = self.block[1]
        return shape[::-1] if self.transpose else shape


def pack(
    plan: Plan,
    listed: Sequence[Entry],
    *,
    to: int | None = None,
    axes: Axes | Literal["all"] = (),
    dtype: torch.dtype | None = None,
    rename: Sequence[RenameLike] = (),
) -> list[Parcel]:
    """What is to be exported of each entry. Collective. Arguments are those of ``export``.

    Raises:
        PlanError: an argument that cannot be, or an abstract mesh.
        CheckpointError: ranks want different things.
    """
    mesh = plan.mesh
    wanted = _check(mesh, to, axes, dtype)
    by_name = {entry.name: entry for entry in listed}
    names = apply_rules(rename, by_name, "the state")
    _check_turns(names, by_name)
    leaves = [(new, turn, by_name[old].shape) for new, (old, turn) in names.items()]
    agree(mesh, "export", {"to": to, "axes": wanted, "dtype": dtype, "leaves": leaves})
    held = extents(mesh, [by_name[old] for old, _ in names.values()])
    out = []
    for (new, (old, turn)), pieces in zip(names.items(), held, strict=True):
        entry = by_name[old]
        local = [axis for axis in _local_axes(plan, entry) if axis not in wanted]
        gathered = tuple(axis for axis in mesh.axis_names if axis in entry.spec.axes and axis not in local)
        members = positions(Ranks(mesh, gathered))
        root = None if to is None else _like(mesh, to, local)
        out.append(
            Parcel(
                name=new,
                entry=entry,
                axes=gathered,
                have=tuple(pieces[rank] for rank in members),
                root=members.index(root) if root in members else None,
                takes_part=root is None or root in members,
                dtype=entry.dtype if dtype is None or not entry.dtype.is_floating_point else dtype,
                transpose=turn,
            )
        )
    return out


def fetch(mesh: Mesh, parcel: Parcel) -> Tensor | None:
    """The leaf, on a rank that gets it. Collective."""
    ranks = Ranks(mesh, parcel.axes)
    lane = ranks.lane  # made by all ranks at the first call, also by those that do not take part
    if not parcel.takes_part:
        return None
    mine = parcel.entry.tensor.to(mesh.device, parcel.dtype)
    low, shape = parcel.block
    receives = parcel.root is None or positions(ranks)[parcel.root] == mesh.rank
    out = torch.empty(math.prod(shape) if receives else 0, dtype=parcel.dtype, device=mine.device)
    for begin, end in _slabs(math.prod(shape), parcel.dtype.itemsize):
        count = end - begin
        if parcel.root is not None:
            want = [Piece(low, shape, begin, end if i == parcel.root else begin) for i in range(ranks.size)]
            transfer(ranks, mine, parcel.have, want, out[begin:end] if receives else None)
            continue
        # All get it: each an equal part of the slab first, whoever held it, then all of them.
        width = -(-count // ranks.size)
        cuts = [(min(begin + i * width, end), min(begin + (i + 1) * width, end)) for i in range(ranks.size)]
        part = transfer(ranks, mine, parcel.have, [Piece(low, shape, a, b) for a, b in cuts])
        part = torch.cat([part, part.new_zeros(width - part.numel())]) if part.numel() < width else part
        stage = out[begin:end] if width * ranks.size == count else part.new_empty(width * ranks.size)
        lane.all_gather(stage.view(torch.uint8), part.view(torch.uint8), marks(mine.device)).wait()
        if stage.numel() != count:
            out[begin:end] = stage[:count]
    if not receives:
        return None
    return out.view(shape).t().contiguous() if parcel.transpose else out.view(shape)


def _check(mesh: Mesh, to: int | None, axes: Axes | Literal["all"], dtype: torch.dtype | None) -> Axes:
    """The axes over which leaves are gathered although compute leaves them local."""
    if mesh.transport is None and mesh.size > 1:
        raise no_processes()
    wanted = mesh.axis_names if axes == "all" else axes if isinstance(axes, tuple | list) else (axes,)
    for axis in wanted:
        if axis not in mesh.axis_names:
            raise unknown_axis(axis, mesh.axis_names)
    if to is not None and (not isinstance(to, int) or isinstance(to, bool) or not 0 <= to < mesh.size):
        raise PlanError(f"to={to!r} must be a rank of the mesh, 0 to {mesh.size - 1}, or None for all ranks")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"dtype={dtype!r} must be a floating-point dtype, or None to keep each leaf's own")
    return tuple(wanted)


def _check_turns(names: Mapping[str, tuple[str, bool]], entries: Mapping[str, Entry]) -> None:
    turned = [entries[old] for old, transpose in names.values() if transpose]
    wrong = [f"{entry.name}: {list(entry.shape)}" for entry in turned if len(entry.shape) != 2]
    if wrong:
        raise TreeError(lines("rename= transposes leaves that have not two dims:", wrong, "Make the rules narrower."))


def agree(mesh: Mesh, what: str, request: Mapping[str, Any]) -> None:
    """See that all ranks ask for the same. Collective.

    Raises:
        CheckpointError: they do not, on all ranks alike.
    """
    enter(mesh, what)
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in request.items()}
    given = {name: str(value) if len(str(value)) < 80 else digests[name] for name, value in request.items()}
    values = all_ranks_or_raise(mesh_lane(mesh, ROLE), lambda: given)
    if any(value != values[0] for value in values):
        rows = [f"rank {rank}: {str(value)[:200]}" for rank, value in enumerate(values)]
        raise CheckpointError(
            lines(f"the arguments of {what} differ between ranks:", rows, "Give the same on all ranks.")
        )


def extents(mesh: Mesh, listed: Sequence[Entry]) -> Iterator[list[Piece]]:
    """For each entry the piece of every rank."""
    numbers = [n for e in listed for p in (e.piece,) for n in (*p.offset, *p.shape, p.start, p.stop)]
    row = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
    rows = exchange(Ranks(mesh, mesh.axis_names).lane, row).tolist()
    at = 0
    for entry in listed:
        dims = len(entry.shape)
        cuts = [row[at : at + 2 * dims + 2] for row in rows]
        yield [Piece(tuple(c[:dims]), tuple(c[dims : 2 * dims]), c[-2], c[-1]) for c in cuts]
        at += 2 * dims + 2


def _local_axes(plan: Plan, entry: Entry) -> Axes:
    """The axes on which units read the leaf of an entry as each rank has it."""
    path = entry.name if entry.name in plan.leaves else split_name(plan, entry.name)[1]
    return plan.leaves[path].compute.axes if path in plan.leaves else ()


def _like(mesh: Mesh, rank: int, local: Sequence[str]) -> int:
    """The rank that is where another one is, and on some axes where this one is."""
    here, there = mesh.coords(), mesh.coords(rank)
    at = [mine if axis in local else theirs for axis, mine, theirs in zip(mesh.axis_names, here, there, strict=True)]
    index = 0
    for size, place in zip(mesh.sizes, at, strict=True):
        index = index * size + place
    return index


def _slabs(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements, of at most ``SLAB`` bytes."""
    step = max(1, SLAB // width)
    return ((begin, min(begin + step, total)) for begin in range(0, total, step))
