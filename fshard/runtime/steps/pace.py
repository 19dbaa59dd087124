"""The pace of a rank from the end of one step to that of the next: its own work, and its waits for other ranks."""

from collections.abc import Sequence
from time import perf_counter

from fshard.schedule.ops import STEP_KINDS, Op
from fshard.schedule.transfers import KINDS

TRANSFERS = frozenset(row.wait for row in KINDS.values() if row.link)
"""The ops that wait for something that travels between ranks."""

WAITS = TRANSFERS | STEP_KINDS
"""These, and those in which ranks meet: whoever comes last waits for nobody."""


def waited(record: Sequence[Op], times: Sequence[float], kinds: frozenset[str] = WAITS) -> float:
    """Seconds in ops of these kinds.

    Args:
        record: the ops that ran.
        times: when each of them began, and one more.
        kinds: of ops.

    >>> waited([Op("handshake"), Op("forward", "root"), Op("consensus")], [0.0, 1.0, 3.0, 3.5])
    1.5
    """
    return sum([times[at + 1] - times[at] for at, op in enumerate(record) if op.kind in kinds])


class Pace:
    """The time that this rank spends on steps of its own accord: its code between steps, and in them.

    Attributes:
        since: when the step before was over on all ranks; None before there was one.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def busy(self, record: Sequence[Op], times: Sequence[float]) -> float:
        """Seconds since the step before in which this rank did not wait for others. Begins the next count.

        Args:
            record: the ops of this step so far.
            times: when each of them began, and the one that is under way; empty if that is not known.
        """
        if len(times) != len(record) + 1:
            return 0.0
        since = times[0] if self.since is None else self.since
        return max(perf_counter() - since - waited(record, times), 0.0)

    def over(self) -> None:
        """A step is over, on all ranks at once."""
        self.since = perf_counter()
