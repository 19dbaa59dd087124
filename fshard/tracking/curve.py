"""Curves of characters: eight dots a cell, of the Braille block of Unicode."""

import math
from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a cell: four rows of two."""


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of some values, the first at the left, as ``height`` lines of ``width`` characters.

    Values share columns of dots where they are more than there are columns: each is their mean. Those that are not
    finite are left out.

    >>> for line in curve([0, 1, 2, 3, 4, 5, 6, 7], 4, 2): print(line)
    ⠀⠀⡠⠊
    ⡠⠊⠀⠀
    """
    columns = binned(values, 2 * width)
    known = [value for value in columns if value is not None]
    cells = [[0x2800] * width for _ in range(height)]
    if known:
        low, high = min(known), max(known)
        rows = 4 * height - 1
        before: int | None = None
        for at, value in enumerate(columns):
            if value is None:
                before = None
                continue
            row = round((high - value) / (high - low) * rows) if high > low else rows // 2
            # Between neighbours a line goes down or up to half of the way, so that the curve has no holes.
            near = row if before is None else before + (row > before) - (row < before)
            for dot in range(min(row, near), max(row, near) + 1):
                cells[dot // 4][at // 2] |= DOTS[dot % 4][at % 2]
            before = row
    return ["".join(map(chr, line)) for line in cells]


def binned(values: Sequence[float], columns: int) -> list[float | None]:
    """The mean of the finite values in each column, or None without any. Few values take few columns."""
    count = min(columns, len(values))
    out: list[float | None] = []
    for at in range(count):
        part = values[at * len(values) // count : (at + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        out.append(sum(finite) / len(finite) if finite else None)
    return out + [None] * (columns - count)
