"""The elements that two pieces of a tensor share, and copying them.

A piece is a range, in row-major order, of a box in the whole tensor. Such a range consists of a few *blocks*: boxes
that lie contiguously in it, a head, a middle and a tail for each dim. Two blocks share a box, which is a strided view
of both, so any layout is copied to any other without a list of elements. ``jax.Array`` and torch.distributed.checkpoint
reshard by intersecting boxes; flat shards, which they do not have, need ranges as well.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from fshard.sharding.layout import Piece
from fshard.sharding.spec import Shape

Box = tuple[Shape, Shape]
"""The low and the high corner of a box."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A piece of a tensor that is written, or read into ``data``, 1-D, which may be added ``onto`` another then."""

    name: str
    piece: Piece
    data: Tensor
    onto: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.data.numel() * self.data.element_size()

    def cut(self, begin: int, end: int) -> "Slice":
        """Its elements ``begin`` to ``end``."""
        piece = replace(self.piece, start=self.piece.start + begin, stop=self.piece.start + end)
        return Slice(self.name, piece, self.data[begin:end])


@dataclass(frozen=True)
class Block:
    """A box in the whole tensor that lies contiguously in a piece, from element ``at`` of the piece."""

    offset: Shape
    shape: Shape
    at: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def within(self, tensor: Tensor, low: Shape, high: Shape) -> Tensor:
        """The view of a box, which lies in this block, of ``tensor``, the piece as a 1-D tensor."""
        return cut_box(tensor[self.at : self.at + self.numel].view(self.shape), (low, high), self.offset)


def cut_box(tensor: Tensor, box: Box, offset: Shape) -> Tensor:
    """The view of a box of the whole tensor in ``tensor``, a part that begins at an offset."""
    return tensor[tuple(slice(a - o, b - o) for a, b, o in zip(*box, offset, strict=True))]


def blocks(piece: Piece) -> list[Block]:
    """The blocks of a piece, in order. At most two a dim, and one more.

    >>> [(block.offset, block.shape) for block in blocks(Piece((0, 4), (3, 2), 1, 6))]
    [((0, 5), (1, 1)), ((1, 4), (2, 2))]
    """
    ranges = _ranges(piece.shape, piece.start, piece.stop)
    return [
        Block(tuple(o + c for o, c in zip(piece.offset, corner, strict=True)), shape, at - piece.start)
        for corner, shape, at in ranges
    ]


def _ranges(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """A range of a box as boxes: corner, shape, and first element."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape), start
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside of one row
        yield from _row(shape, last, start, stop)
        return
    yield from _row(shape, first - 1, start, first * inner)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * inner
    yield from _row(shape, last, last * inner, stop)


def _row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """A range inside of one row of a box."""
    base = row * math.prod(shape[1:])
    for corner, sizes, at in _ranges(shape[1:], start - base, stop - base):
        yield (row, *corner), (1, *sizes), at + base


def overlap(one: Block, other: Block) -> Box | None:
    """The box that two blocks share; None if they share no element."""
    low = tuple(map(max, one.offset, other.offset))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def shared(one: Piece, other: Piece) -> Iterator[tuple[Block, Block, Box]]:
    """The boxes that two pieces share, each with its block in either, in the order of ``one``."""
    if (one.offset, one.shape) == (other.offset, other.shape):  # ranges of one box share a range of it
        one, other = (Piece((0,), (math.prod(p.shape),), p.start, p.stop) for p in (one, other))
    for mine in blocks(one):
        for theirs in blocks(other):
            if (box := overlap(mine, theirs)) is not None:
                yield mine, theirs, box


def shared_range(one: Piece, other: Piece) -> tuple[int, int] | None:
    """The smallest range of ``one`` that holds all elements of ``other`` in it; None if they share none."""
    ends = [_span(block, one.start, box) for block, _, box in shared(one, other)]
    return (min(a for a, _ in ends), max(b for _, b in ends)) if ends else None


def _span(block: Block, start: int, box: Box) -> tuple[int, int]:
    """The range in the piece of a box in a block."""
    first = last = 0
    for a, b, o, n in zip(*box, block.offset, block.shape, strict=True):
        first, last = first * n + a - o, last * n + b - 1 - o
    return start + block.at + first, start + block.at + last + 1


def copy_shared(target: Tensor, to: Piece, source: Tensor, of: Piece) -> None:
    """Copy the elements that two pieces share from ``source``, the piece ``of``, to ``target``, the piece ``to``."""
    for mine, theirs, box in shared(to, of):
        mine.within(target, *box).copy_(theirs.within(source, *box))
