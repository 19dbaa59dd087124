"""The plan of an export: what each rank sends and receives of each leaf, and the collectives that do it.

A leaf travels in slabs of bounded size, so beside the leaf itself a rank holds one slab. Ranks exchange once, as
numbers, which piece of each leaf they hold; everything else follows from these, so any layout can be exported.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.checkpoint.ranges import blocks, overlap
from fshard.collectives.ranks import Ranks
from fshard.errors import CheckpointError, PlanError, TreeError, lines, no_processes, unknown_axis
from fshard.interchange.optimizer_state import split_name
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.runtime.comm import Communicator, all_ranks_or_raise, enter, exchange, mesh_communicator
from fshard.runtime.comm.streams import events
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.entries import Entry

ROLE = "interchange"
"""The role of the communicator on which ranks compare arguments and report failures."""

SLAB = 16 << 20
"""Bytes of a leaf that are gathered at a time."""


@dataclass(frozen=True, eq=False)
class ExportItem:
    """One leaf to export.

    Attributes:
        name: its exported name.
        entry: this rank's part.
        axes: the axes over which it is gathered.
        have: the piece of each rank along them, in ascending order of rank.
        root: the position of the rank that receives it; None if all of them do.
        takes_part: whether this rank sends or receives.
        dtype: its exported dtype.
        transpose: whether its two dims are swapped.
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
        """The offset and shape of the box that the ranks hold together."""
        dims = range(len(self.entry.shape))
        low = tuple(min(piece.offset[d] for piece in self.have) for d in dims)
        high = [max(piece.offset[d] + piece.shape[d] for piece in self.have) for d in dims]
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
    """The items of an export of these entries, with the arguments of ``export``. Collective.

    Raises:
        PlanError: an invalid argument, or an abstract mesh.
        CheckpointError: ranks pass different arguments.
    """
    mesh = plan.mesh
    wanted = _check(mesh, to, axes, dtype)
    by_name = {entry.name: entry for entry in listed}
    names = apply_rules(rename, by_name, "the state")
    _check_transposed([by_name[old] for old, transpose in names.values() if transpose])
    leaves = [(new, turn, by_name[old].shape) for new, (old, turn) in names.items()]
    compare_arguments(mesh, "export", {"to": to, "axes": wanted, "dtype": dtype, "leaves": leaves})
    held = pieces_of_ranks(mesh, [by_name[old] for old, _ in names.values()])
    return [
        _item(plan, new, by_name[old], pieces, wanted, to, dtype, turn)
        for (new, (old, turn)), pieces in zip(names.items(), held, strict=True)
    ]


def _item(
    plan: Plan,
    name: str,
    entry: Entry,
    pieces: Sequence[Piece],
    wanted: Axes,
    to: int | None,
    dtype: torch.dtype | None,
    transpose: bool,
) -> ExportItem:
    """The item of one entry, whose ``pieces`` are those of all ranks."""
    mesh = plan.mesh
    local = [axis for axis in _compute_axes(plan, entry) if axis not in wanted]
    gathered = tuple(axis for axis in mesh.axis_names if axis in entry.spec.axes and axis not in local)
    members = _positions(Ranks(mesh, gathered))
    have = tuple(pieces[rank] for rank in members)
    out = entry.dtype if dtype is None or not entry.dtype.is_floating_point else dtype
    if to is None:
        return ExportItem(name, entry, gathered, have, None, True, out, transpose)
    root = _counterpart(mesh, to, local)
    position = members.index(root) if root in members else None
    return ExportItem(name, entry, gathered, have, position, root in members, out, transpose)


def _check_transposed(entries: Sequence[Entry]) -> None:
    wrong = [f"{entry.name}: {list(entry.shape)}" for entry in entries if len(entry.shape) != 2]
    if wrong:
        raise TreeError(lines("rename= transposes leaves that have not two dims:", wrong, "Make the rules narrower."))


def fetch(mesh: Mesh, item: ExportItem) -> Tensor | None:
    """The leaf of an item, on ranks that receive it. Collective."""
    ranks = Ranks(mesh, item.axes)
    comm = ranks.comm  # all ranks make it at the first call, even those that do not take part
    if not item.takes_part:
        return None
    mine = item.entry.tensor.to(mesh.device, item.dtype)
    low, shape = item.block
    total, receives = math.prod(shape), item.root is None or _positions(ranks)[item.root] == mesh.rank
    out = torch.empty(total if receives else 0, dtype=item.dtype, device=mine.device)
    step = max(1, SLAB // item.dtype.itemsize)
    for begin in range(0, total, step):
        end = min(begin + step, total)
        slab = out[begin:end] if receives else None
        if item.root is None:
            _gather_slab(comm, ranks, mine, item, out[begin:end], begin, end)
        else:
            want = [Piece(low, shape, begin, end if i == item.root else begin) for i in range(ranks.size)]
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
    comm.all_gather(slab.view(torch.uint8), part.view(torch.uint8), events(mine.device)).wait()
    if slab.numel() != count:
        out.copy_(slab[:count])


def compare_arguments(mesh: Mesh, call: str, given: Mapping[str, Any]) -> None:
    """Raise a CheckpointError on all ranks if they pass different arguments. Collective."""
    enter(mesh, call)
    texts = {name: str(value) for name, value in given.items()}
    short = {name: text if len(text) < 80 else _digest(given[name]) for name, text in texts.items()}
    values = all_ranks_or_raise(mesh_communicator(mesh, ROLE), lambda: short)
    if any(value != values[0] for value in values):
        rows = [f"rank {rank}: {str(value)[:200]}" for rank, value in enumerate(values)]
        remedy = "Give the same on all ranks."
        raise CheckpointError(lines(f"the arguments of {call} differ between ranks:", rows, remedy))


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def pieces_of_ranks(mesh: Mesh, listed: Sequence[Entry]) -> Iterator[list[Piece]]:
    """For each entry the piece of every rank. Collective, one exchange."""
    numbers = [n for e in listed for p in (e.piece,) for n in (*p.offset, *p.shape, p.start, p.stop)]
    row = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
    rows = exchange(Ranks(mesh, mesh.axis_names).comm, row).tolist()
    at = 0
    for entry in listed:
        dims = len(entry.piece.shape)
        cuts = [row[at : at + 2 * dims + 2] for row in rows]
        yield [Piece(tuple(c[:dims]), tuple(c[dims : 2 * dims]), c[-2], c[-1]) for c in cuts]
        at += 2 * dims + 2


def exchange_pieces(
    ranks: Ranks, mine: Tensor, have: Sequence[Piece], want: Sequence[Piece], out: Tensor | None = None
) -> Tensor:
    """The piece that this rank wants, 1-D, by one all-to-all. Collective over ``ranks``.

    Args:
        ranks: the ranks that take part; positions are in ascending order of rank.
        mine: this rank's piece, 1-D.
        have: the piece of each position. Of equal pieces the receiver takes its own, or any other.
        want: the piece that each position wants, which may be empty; together ``have`` must hold them.
        out: the 1-D tensor for the wanted piece; None allocates one.
    """
    me, count = _positions(ranks).index(ranks.mesh.rank), len(have)
    out = torch.empty(want[me].numel, dtype=mine.dtype, device=mine.device) if out is None else out
    sent: list[list[Tensor]] = [[] for _ in range(count)]
    places: list[list[Tensor]] = [[] for _ in range(count)]
    for other in range(count):
        if _supplier(have, me, other) == me:
            sent[other] = [block.within(mine, *box) for block, _, box in _shared(have[me], want[other])]
        if _supplier(have, other, me) == other:
            places[other] = [block.within(out, *box) for _, block, box in _shared(have[other], want[me])]
    for place, view in zip(places[me], sent[me], strict=True):  # this rank's own elements are copied directly
        place.copy_(view)
    sent[me] = places[me] = []
    if count > 1:
        _all_to_all(ranks, mine[:0], sent, places)
    return out


def _all_to_all(ranks: Ranks, empty: Tensor, sent: list[list[Tensor]], places: list[list[Tensor]]) -> None:
    """Copy the views for each position to its places. Elements travel as bytes, whatever their dtype."""
    width = empty.element_size()
    send = [width * sum(view.numel() for view in views) for views in sent]
    receive = [width * sum(place.numel() for place in row) for row in places]
    flat = torch.cat([view.reshape(-1) for views in sent for view in views] or [empty])
    arrived = flat.new_empty(sum(receive) // width)
    data = arrived.view(torch.uint8), flat.view(torch.uint8)
    ranks.comm.all_to_all(*data, receive, send, events(flat.device)).wait()
    at = 0
    for place in (place for row in places for place in row):
        place.copy_(arrived[at : at + place.numel()].view(place.shape))
        at += place.numel()


def _positions(ranks: Ranks) -> list[int]:
    """The ranks of a group in ascending order, which is the order of its communicator."""
    return sorted(ranks.mesh.ranks(ranks.axes))


def _supplier(have: Sequence[Piece], holder: int, target: int) -> int:
    """Which of the positions with the holder's piece sends it to a target."""
    if have[target] == have[holder]:
        return target
    copies = [position for position, piece in enumerate(have) if piece == have[holder]]
    return copies[target % len(copies)]


def _shared(have: Piece, want: Piece) -> list[tuple[Any, Any, tuple[Shape, Shape]]]:
    """The boxes that two pieces share, each with its block in either, in the order of ``have``."""
    pairs = [(mine, theirs, overlap(mine, theirs)) for mine in blocks(have) for theirs in blocks(want)]
    return [(mine, theirs, box) for mine, theirs, box in pairs if box is not None]


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
