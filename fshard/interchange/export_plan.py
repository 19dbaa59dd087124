"""The plan of an export: what each rank sends and receives of each leaf, and the collectives that do it.

A leaf travels in slabs of bounded size, so beside the leaf itself a rank holds one slab. Ranks exchange once, as
numbers, which piece of each leaf they hold; everything else follows from these, so any layout can be exported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.checkpoint.ranges import shared
from fshard.collectives.ranks import Ranks
from fshard.errors import CheckpointError, PlanError, TreeError, lines, no_processes, unknown_axis
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.runtime.comm import Communicator, all_ranks_or_raise, enter, mesh_communicator
from fshard.runtime.comm.facts import compare, facts_of
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.pieces import Entry, split_name

ROLE = "control of interchange"  # messages of the host: leaves travel on the communicators of collectives
"""The role of the communicator on which ranks compare arguments and report failures."""

SLAB = 16 << 20
"""Bytes of a leaf that are gathered at a time."""


@dataclass(frozen=True, eq=False)
class ExportItem:
    """One leaf to export.

    Attributes:
        name: its exported name.
        entry: this rank's part.
        ranks: the ranks over which it is gathered.
        have: the piece of each of them, in ascending order of rank.
        root: the rank that receives it; None if all of them do.
        dtype: its exported dtype.
        transpose: whether its two dims are swapped.
    """

    name: str
    entry: Entry
    ranks: Ranks
    have: tuple[Piece, ...]
    root: int | None
    dtype: torch.dtype
    transpose: bool

    @property
    def block(self) -> tuple[Shape, Shape]:
        """The offset and shape of the box that the ranks hold together."""
        low = tuple(map(min, zip(*(piece.offset for piece in self.have), strict=True)))
        ends = ([o + n for o, n in zip(piece.offset, piece.shape, strict=True)] for piece in self.have)
        high = map(max, zip(*ends, strict=True))
        return low, tuple(b - a for a, b in zip(low, high, strict=True))

    @property
    def shape(self) -> Shape:
        """The exported shape."""
        shape = self.block[1]
        return shape[::-1] if self.transpose else shape


def plan_export(
    plan: Plan,
    listed: Sequence[Entry],
    *,
    to: int | None = None,
    axes: Axes | Literal["all"] = (),
    dtype: torch.dtype | None = None,
    rename: Sequence[RenameLike] = (),
) -> list[ExportItem]:
    """The items of an export of these entries, with the arguments of ``export``. Collective."""
    mesh = plan.mesh
    wanted = _check(mesh, to, axes, dtype)
    by_name = {entry.name: entry for entry in listed}
    names = _renamed(rename, by_name)
    shapes = {f"leaf {new}": (by_name[old].shape, transpose) for new, (old, transpose) in names.items()}
    compare_arguments(mesh, "export", {"to": to, "axes": wanted, "dtype": dtype, "order": list(names), **shapes})
    pieces = pieces_of_ranks(mesh, [by_name[old] for old, _ in names.values()])
    out = []
    for (name, (old, transpose)), held in zip(names.items(), pieces, strict=True):
        entry = by_name[old]
        local = [axis for axis in _compute_axes(plan, entry) if axis not in wanted]
        ranks = Ranks(mesh, tuple(axis for axis in mesh.axis_names if axis in entry.spec.axes and axis not in local))
        have = tuple(held[rank] for rank in positions(ranks))
        root = None if to is None else _counterpart(mesh, to, local)
        exported = entry.dtype if dtype is None or not entry.dtype.is_floating_point else dtype
        out.append(ExportItem(name, entry, ranks, have, root, exported, transpose))
    return out


def _renamed(rules: Sequence[RenameLike], entries: Mapping[str, Entry]) -> dict[str, tuple[str, bool]]:
    """The exported names, as from ``apply_rules``; only leaves of two dims are transposed."""
    names = apply_rules(rules, entries, "the state")
    turned = {old: entries[old].shape for old, transpose in names.values() if transpose}
    if wrong := [f"{name}: {list(shape)}" for name, shape in turned.items() if len(shape) != 2]:
        raise TreeError(lines("rename= transposes leaves that have not two dims:", wrong, "Make the rules narrower."))
    return names


def fetch(item: ExportItem) -> Tensor | None:
    """The leaf of an item, on ranks that receive it. Collective."""
    ranks, root = item.ranks, item.root
    comm, members = ranks.comm, positions(ranks)  # all ranks make the communicator, even those that take no part
    if root is not None and root not in members:
        return None
    mine = item.entry.tensor.to(ranks.mesh.device, item.dtype)
    low, shape = item.block
    total, receives = math.prod(shape), root is None or root == ranks.mesh.rank
    out = torch.empty(total if receives else 0, dtype=item.dtype, device=mine.device)
    step = max(1, SLAB // item.dtype.itemsize)
    for begin in range(0, total, step):
        end = min(begin + step, total)
        slab = out[begin:end] if receives else None
        if root is None:
            _gather_slab(comm, ranks, mine, item, out[begin:end], begin, end)
        else:
            want = [Piece(low, shape, begin, end if rank == root else begin) for rank in members]
            exchange_pieces(ranks, mine, item.have, want, slab)
    if not receives:
        return None
    return out.view(shape).t().contiguous() if item.transpose else out.view(shape)


def _gather_slab(
    comm: Communicator, ranks: Ranks, mine: Tensor, item: ExportItem, out: Tensor, begin: int, end: int
) -> None:
    """Send a slab to all ranks: first an equal part to each rank, then all ranks gather the parts. Collective."""
    low, shape = item.block
    count, width = end - begin, -(-(end - begin) // ranks.size)
    cuts = [(min(begin + i * width, end), min(begin + (i + 1) * width, end)) for i in range(ranks.size)]
    part = exchange_pieces(ranks, mine, item.have, [Piece(low, shape, a, b) for a, b in cuts])
    part = torch.cat([part, part.new_zeros(width - part.numel())]) if part.numel() < width else part
    slab = out if width * ranks.size == count else part.new_empty(width * ranks.size)
    comm.all_gather(slab.view(torch.uint8), part.view(torch.uint8)).wait()
    if slab.numel() != count:
        out.copy_(slab[:count])


def compare_arguments(mesh: Mesh, call: str, given: Mapping[str, Any]) -> None:
    """Raise a CheckpointError on all ranks if they pass different arguments. Collective."""
    enter(mesh, call)
    facts = facts_of({f"{call}: {name}": str(value) for name, value in given.items()})
    compare(mesh_communicator(mesh, ROLE), facts, CheckpointError)


def pieces_of_ranks(mesh: Mesh, listed: Sequence[Entry]) -> list[list[Piece]]:
    """For each entry the piece of every rank. Collective, one exchange."""
    own = [(e.piece.offset, e.piece.shape, e.piece.start, e.piece.stop) for e in listed]
    ranks = all_ranks_or_raise(mesh_communicator(mesh, ROLE), lambda: own)
    rows = zip(*ranks, strict=True)
    return [[Piece(tuple(o), tuple(n), start, stop) for o, n, start, stop in row] for row in rows]


def exchange_pieces(
    ranks: Ranks, mine: Tensor, have: Sequence[Piece], want: Sequence[Piece], out: Tensor | None = None
) -> Tensor:
    """The piece that this rank wants, 1-D, in ``out`` if it is given, by one all-to-all. Collective over ``ranks``.

    ``have`` and ``want`` are the pieces that each of the ranks, in ascending order, holds and wants; ``mine`` is this
    rank's, 1-D. Of equal pieces the receiver takes its own, or any other.
    """
    me, count = positions(ranks).index(ranks.mesh.rank), len(have)
    out = torch.empty(want[me].numel, dtype=mine.dtype, device=mine.device) if out is None else out
    sent: list[list[Tensor]] = [[] for _ in range(count)]
    places: list[list[Tensor]] = [[] for _ in range(count)]
    for other in range(count):
        if _supplier(have, me, other) == me:
            sent[other] = [block.within(mine, *box) for block, _, box in shared(have[me], want[other])]
        if _supplier(have, other, me) == other:
            places[other] = [block.within(out, *box) for _, block, box in shared(have[other], want[me])]
    for place, view in zip(places[me], sent[me], strict=True):  # this rank's own elements are copied directly
        place.copy_(view)
    sent[me] = places[me] = []
    if count > 1:
        _all_to_all(ranks, mine[:0], sent, places)
    return out


def send_rows(item: ExportItem, row: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
    """Send each rank's row of bytes to the ranks that receive an item: the rows of all pieces, once each. Collective.

    ``sizes`` are those of the rows of all ranks in ascending order. None on ranks that receive nothing.
    """
    members = positions(item.ranks)
    me, count = members.index(item.ranks.mesh.rank), len(members)
    targets = range(count) if item.root is None else [members.index(item.root)]
    sent, places = [[row[:0]] for _ in range(count)], [[row[:0]] for _ in range(count)]
    first = {piece: holder for holder, piece in reversed(list(enumerate(item.have)))}
    for target in targets:
        if first[item.have[me]] == me and target != me:
            sent[target] = [row]
    for holder in first.values() if me in targets else ():
        places[holder] = [row if holder == me else row.new_empty(sizes[holder])]
    own, places[me] = places[me], []
    if count > 1:
        _all_to_all(item.ranks, row[:0], sent, places)
    places[me] = own
    return [rows[0] for rows in places if rows[0].numel()] if me in targets else None


def _all_to_all(ranks: Ranks, empty: Tensor, sent: list[list[Tensor]], places: list[list[Tensor]]) -> None:
    """Copy the views for each position to its places. Elements travel as bytes, whatever their dtype."""
    width = empty.element_size()
    send = [width * sum(view.numel() for view in views) for views in sent]
    receive = [width * sum(place.numel() for place in row) for row in places]
    flat = torch.cat([view.reshape(-1) for views in sent for view in views] or [empty])
    arrived = flat.new_empty(sum(receive) // width)
    data = arrived.view(torch.uint8), flat.view(torch.uint8)
    ranks.comm.all_to_all(*data, receive, send).wait()
    at = 0
    for place in (place for row in places for place in row):
        place.copy_(arrived[at : at + place.numel()].view(place.shape))
        at += place.numel()


def positions(ranks: Ranks) -> list[int]:
    """The ranks of a group in ascending order, which is the order of its communicator."""
    return sorted(ranks.mesh.ranks(ranks.axes))


def _supplier(have: Sequence[Piece], holder: int, target: int) -> int:
    """Say which of the positions with the holder's piece sends it to a target."""
    if have[target] == have[holder]:
        return target
    copies = [position for position, piece in enumerate(have) if piece == have[holder]]
    return copies[target % len(copies)]


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


def _compute_axes(plan: Plan, entry: Entry) -> Axes:
    """The axes on which compute leaves the leaf of an entry local."""
    path = entry.name if entry.name in plan.leaves else split_name(entry.name, plan.leaves)[1]
    return plan.leaves[path].compute.axes if path in plan.leaves else ()


def _counterpart(mesh: Mesh, rank: int, local: Sequence[str]) -> int:
    """The rank with this rank's coordinates on the axes ``local``, and those of ``rank`` on the others."""
    here, there = mesh.coords(), mesh.coords(rank)
    index = 0
    for axis, size, mine, theirs in zip(mesh.axis_names, mesh.sizes, here, there, strict=True):
        index = index * size + (mine if axis in local else theirs)
    return index
