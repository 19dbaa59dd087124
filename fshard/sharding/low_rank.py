"""The matrices of a gradient shard that travel as products of two narrow ones (PowerSGD, Vogels et al., 2019).

A leaf of more than one dim is a matrix: its first dim, and all others. A rank works on the whole rows that it holds of
one. Rows that the end of a flat shard cuts, vectors, and matrices that would save less than half travel exact.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from fshard.sharding.layout import Group
from fshard.sharding.spec import Shape

LEAST = 2
"""A matrix travels as a product if that has at most one in so many of its elements."""


class Matrix(NamedTuple):
    """Whole rows of a leaf in a rank's shard.

    Attributes:
        leaf: the number of the leaf.
        begin: the first element in the shard.
        rows: how many.
        cols: elements of a row.
        basis: where the second factor of its product begins in the group's.
    """

    leaf: int
    begin: int
    rows: int
    cols: int
    basis: int

    @property
    def end(self) -> int:
        """The end of its elements in the shard."""
        return self.begin + self.rows * self.cols


def saves(rows: int, cols: int, rank: int) -> bool:
    """Tell whether a matrix travels as a product of this rank.

    >>> saves(64, 64, 4), saves(16, 16, 4), saves(4096, 4, 1)
    (True, True, True)
    """
    return LEAST * (rows + cols) * rank <= rows * cols


def basis_shape(shape: Shape, rank: int) -> tuple[int, int] | None:
    """The shape of what is kept of a leaf of this shape, the second factor of its product; None for an exact one.

    >>> basis_shape((64, 8, 16), 4), basis_shape((64,), 4), basis_shape((4, 4), 4)
    ((128, 4), None, None)
    """
    rows, cols = shape[0] if shape else 0, math.prod(shape[1:])
    return (cols, rank) if len(shape) > 1 and saves(rows, cols, rank) else None


def rank_of(group: Group) -> int:
    """The rank of the products as which sums over a group's replicas travel; 0 where they do not."""
    return group.wires["replica_reduce"].rank if group.feedback else 0


def bases(group: Group, rank: int) -> dict[int, tuple[int, tuple[int, int]]]:
    """Return where the second factors of a group's leaves begin in their buffer, and their shapes, by leaf number."""
    out, end = {}, 0
    for number, leaf in enumerate(group.leaves):
        shape = basis_shape(leaf.shape, rank) if rank else None
        if shape is not None:
            out[number] = end, shape
            end += math.prod(shape)
    return out


def matrices(group: Group, part: int, rank: int) -> Iterator[Matrix]:
    """The matrices in one of a group's shards, in their order.

    Args:
        group: as the optimizer sees it.
        part: the number of the shard.
        rank: of the products.
    """
    for number, (at, (cols, _)) in bases(group, rank).items():
        begin, end = group.shard_range(number, part)
        first = part * group.chunk + begin - group.starts[number] if group.kind == "flat" else 0
        skipped = -first % cols
        rows = (end - begin - skipped) // cols
        if begin < end and rows > 0 and saves(rows, cols, rank):
            yield Matrix(number, begin + skipped, rows, cols, at)


def gaps_of(found: list[Matrix], length: int) -> list[tuple[int, int]]:
    """The ranges of a shard between its matrices."""
    ends, begins = [0, *(one.end for one in found)], [*(one.begin for one in found), length]
    return [(a, b) for a, b in zip(ends, begins, strict=True) if a < b]


def travels(group: Group, part: int, rank: int) -> int:
    """The elements that a shard sends to another replica: both factors of its products, and the rest."""
    found = [*matrices(group, part, rank)]
    rest = group.chunk - sum(one.rows * one.cols for one in found)
    return rest + sum((one.rows + one.cols) * rank for one in found)


def most_travels(group: Group, rank: int) -> int:
    """The same of the shard that sends most."""
    return max(travels(group, part, rank) for part in range(group.parts))


def left_numel(group: Group) -> int:
    """The elements that a sum over a group's replicas leaves for the next one: a residual, and second factors."""
    basis = sum(math.prod(shape) for _, shape in bases(group, rank_of(group)).values())
    return group.owned.chunk + basis if group.feedback else 0
