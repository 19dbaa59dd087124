"""The random bits of stochastic rounding, by key and index, and their sum with numbers.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): a
hash of a key and a counter in seventeen operators, where ``fshard.model.philox`` takes 120. Rounding needs 16 bits
an element, for every element of a model in every step, and no more than their independence of the values. One counter
gives the bits of four elements: element ``i`` of a leaf takes word ``i % 4`` of counter ``i // 4``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.sharding.layout import Piece

WEYL = -7046029254386353131
"""The distance of two counters' states: 2**64 divided by the golden ratio."""

MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shifts of a state that is xored with itself, and what it is multiplied by then."""


Key = int | Tensor
"""64 bits of a rounding, or where they are: one int64 element on the device."""


class LeafPart(NamedTuple):
    """A leaf's part of a buffer.

    Attributes:
        begin: its first element in the buffer, a multiple of 4.
        key: of its bits.
        start: the index of that element in the box of the leaf that this rank holds, a multiple of 4.
        levels: from the index in the box to that in the leaf, see ``levels``.
    """

    begin: int
    key: int
    start: int
    levels: tuple[tuple[int, int, int], ...] = ()


def levels(shape: tuple[int, ...], piece: Piece) -> tuple[tuple[int, int, int], ...]:
    """The maps from an index in the box of a piece to that in the whole leaf: one for each dim that the box cuts.

    Each is three numbers: where the box has rows of ``a`` elements and the leaf has rows of ``b``, in which those of
    the box begin at ``c``, index ``i`` becomes ``i // a * b + i % a + c``.

    >>> levels((4, 6), Piece((2, 3), (2, 3), 0, 6))
    ((3, 6, 3), (12, 24, 12))
    """
    found, box = [], list(piece.shape)
    for dim in reversed(range(len(shape))):
        if box[dim] != shape[dim]:
            narrow, inner = math.prod(box[dim:]), math.prod(box[dim + 1 :])
            box[dim] = shape[dim]
            found.append((narrow, math.prod(box[dim:]), piece.offset[dim] * inner))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Positions:
    """The leaves whose elements a buffer holds.

    Attributes:
        table: int64, on the device of the buffer: a column a leaf, whose rows are begin, key, the distance from an
            element's place in the buffer to its index in the box, and three for each level.
        ends: the begins of all leaves but the first, in elements or, where all leaves are whole, in counters.
        base: the state of counter 0 of each leaf, counted from the begin of the buffer, where all are whole.
        levels: the number of levels.
    """

    table: Tensor
    ends: Tensor
    base: Tensor
    levels: int

    @staticmethod
    def of(rows: Sequence[LeafPart], device: torch.device) -> "Positions":
        """The positions of these leaves, the first of which begins at 0."""
        depth = max([len(row.levels) for row in rows])
        same = (1 << 62, 0, 0)
        lines = []
        for row in rows:
            maps = [*row.levels, *[same] * (depth - len(row.levels))]
            far, key = row.start - row.begin, signed(row.key)
            lines.append([row.begin, key, far, *[n for each in maps for n in each], signed(key + (far >> 2) * WEYL)])
        whole = torch.tensor(lines, dtype=torch.int64, device="cpu").t().contiguous().to(device)
        return Positions(whole[:-1], whole[0, 1:] if depth else whole[0, 1:] >> 2, whole[-1], depth)

    @property
    def grain(self) -> int:
        """The neighbours that take their bits from one counter."""
        return 1 if self.levels else 4


def round_(x: Tensor, end: int, positions: Positions, key: Key) -> None:
    """Round float32 numbers up to an end to bfloat16's, in place: up or down, with the probability of what is cut off.

    Infinities and nan stay.

    Args:
        x: 1-D.
        end: a multiple of four.
        positions: the leaves that it holds.
        key: of this rounding.

    >>> x = torch.full((8,), 1.00390625)  # between two neighbours
    >>> round_(x, 8, Positions.of([LeafPart(0, 7, 0)], x.device), key=1)
    >>> sorted(set(x.tolist()))
    [1.0, 1.0078125]
    """
    size = block(x.device)
    for begin in range(0, end, size):
        part = x[begin : min(begin + size, end)]
        odd, whole = part.ne(part), part.view(torch.int32)
        whole.add_(_bits(positions, begin, begin + len(part), key)).add_(1 << 15).bitwise_and_(-65536)
        part.masked_fill_(odd, torch.nan)  # an infinity has no bits below, so it stays by itself


def block(device: torch.device) -> int:
    """The elements that are rounded at once, which bounds the temporaries, some twelve bytes for each."""
    return 1 << 16 if device.type == "cpu" else 1 << 22


def _bits(positions: Positions, begin: int, end: int, key: Key) -> Tensor:
    """Random bits for elements of a buffer: int16, from ``-2**15`` to ``2**15 - 1``."""
    grain, table = positions.grain, positions.table
    key = key if isinstance(key, Tensor) else signed(key)
    at = torch.arange(begin // grain, end // grain, device=table.device)
    leaf = torch.bucketize(at, positions.ends, right=True)
    if grain == 4:
        return _mixed(positions.base.index_select(0, leaf).add_(at, alpha=WEYL).add_(key)).view(torch.int16)
    _, keys, far, *maps = table.index_select(1, leaf)
    index = at.add_(far)
    for a, b, c in zip(*[iter(maps)] * 3, strict=True):
        index = (index // a).mul_(b).add_(index % a).add_(c)
    state = _mixed(keys.add(index >> 2, alpha=WEYL).add_(key))
    return (state >> (index & 3).mul_(16)).to(torch.int16)


def _mixed(state: Tensor) -> Tensor:
    """The 64 bits of states, int64, in place.

    >>> hex(_mixed(torch.tensor([WEYL])).item() % (1 << 64))
    '0xe220a8397b1dcdaf'
    """
    for shift, factor in MIX:
        # >> copies the sign, which the mask takes away.
        state.bitwise_xor_((state >> shift).bitwise_and_((1 << 64 - shift) - 1))
        if factor != 1:
            state.mul_(factor)
    return state


def signed(n: int) -> int:
    """The number from ``-2**63`` to ``2**63 - 1`` with the lowest 64 bits of an integer."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)
