"""The elements that two pieces of a tensor share, and copying them.

A piece is a range, in row-major order, of a box in the whole tensor. Such a range consists of a few *blocks*: boxes
that lie contiguously in it, a head, a middle and a tail for each dim. Two blocks share a box, which is a strided view
of both, so any layout is copied to any other without a list of elements. ``jax.Array`` and torch.distributed.checkpoint
reshard by intersecting boxes; flat shards, which they do not have, need ranges as well.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fshard.sharding.layout import Piece
from fshard.sharding.spec import Shape


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
        box = tensor[self.at : self.at + self.numel].view(self.shape)
        for dim, (a, b, start) in enumerate(zip(low, high, self.offset, strict=True)):
            box = box.narrow(dim, a - start, b - a)
        return box


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


def overlap(one: Block, other: Block) -> tuple[Shape, Shape] | None:
    """The box that two blocks share, as its low and high corner; None if they share no element."""
    low = tuple(map(max, one.offset, other.offset))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def shared_range(one: Piece, other: Piece) -> tuple[int, int] | None:
    """The smallest range of ``one`` that holds all elements of ``other`` in it; None if they share none."""
    if one.offset == other.offset and one.shape == other.shape:
        low, high = max(one.start, other.start), min(one.stop, other.stop)
        return (low, high) if low < high else None
    ends = [
        _span(block, one.start, found)
        for block in blocks(one)
        for theirs in blocks(other)
        if (found := overlap(block, theirs)) is not None
    ]
    return (min(a for a, _ in ends), max(b for _, b in ends)) if ends else None


def _span(block: Block, start: int, box: tuple[Shape, Shape]) -> tuple[int, int]:
    """The range in the piece of a box in a block."""
    first = last = 0
    for a, b, o, n in zip(*box, block.offset, block.shape, strict=True):
        first, last = first * n + a - o, last * n + b - 1 - o
    return start + block.at + first, start + block.at + last + 1


def copy_shared(target: Tensor, to: Piece, source: Tensor, of: Piece) -> None:
    """Copy the elements that two pieces share from ``source``, the piece ``of``, to ``target``, the piece ``to``."""
    if to.offset == of.offset and to.shape == of.shape:
        low, high = max(to.start, of.start), min(to.stop, of.stop)
        if low < high:
            target[low - to.start : high - to.start].copy_(source[low - of.start : high - of.start])
        return
    for mine in blocks(to):
        for theirs in blocks(of):
            if (box := overlap(mine, theirs)) is not None:
                mine.within(target, *box).copy_(theirs.within(source, *box))
