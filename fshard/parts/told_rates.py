"""Learning rates that a step function gives its updates, compared between ranks by sums of numbers."""

import struct
from collections.abc import Mapping, Sequence

from fshard.errors import ReplicationError
from fshard.parts.step_values import Updated
from fshard.runtime.comm import digest

PIECES = 4
"""Parts of 16 bits into which a number is cut, so that sums of their squares over millions of ranks are exact."""

TOLD = 1 + 2 * PIECES
"""How many numbers tell a learning rate."""


def told_rate(lr: float | Mapping[str, float] | None) -> list[float]:
    """Return what a rank tells the others of the learning rate of an update.

    1, for itself, its pieces, and their squares.

    >>> told_rate(None)
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    if lr is None:
        return [1.0] + [0.0] * (2 * PIECES)
    bits = struct.pack("<Q", digest(sorted(lr.items()))) if isinstance(lr, Mapping) else struct.pack("<d", lr)
    pieces = [piece + 1.0 for piece in struct.unpack("<4H", bits)]  # 0 is for the optimizer's own
    return [1.0, *pieces, *[piece * piece for piece in pieces]]


def check_rates(updated: Updated, sums: Sequence[float]) -> None:
    """Refuse learning rates that differ between ranks, by the sums of what ranks told.

    Numbers are equal if the mean of their squares is the square of their mean.

    Raises:
        ReplicationError: on all ranks alike.
    """
    ranks, *rest = map(int, sums)
    if any(ranks * squares != total * total for total, squares in zip(rest[:PIECES], rest[PIECES:], strict=True)):
        own = "none" if updated.lr is None else repr(updated.lr)
        raise ReplicationError(
            f"ranks gave {updated.part!r} different learning rates in one step; this rank gave {own}: take lr= from "
            f"what is equal on all ranks, such as the state's step or a loss that the step returned"
        )
