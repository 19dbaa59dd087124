"""Wires: what transfers of several communicators share, as connections do that get equal parts of a link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Time = Any
"""Seconds: a float, or a tensor with one for each rank."""

NEVER = 1e18
"""Seconds that nothing takes."""


@dataclass(eq=False)
class Passing:
    """A transfer on a wire.

    Attributes:
        lane: the communicator that it belongs to.
        start: when its first byte goes.
        left: what the wire must do for its lane until it is over, as seconds of the wire alone.
        over: when that is, as far as is known: what begins later on another lane makes it later.
        least: when it is over at the earliest, whatever else the wire carries.
        ahead: seconds by which a link that lets bursts pass is ahead of its rate.
    """

    lane: str
    start: Time
    left: Time
    over: Time
    least: Time
    ahead: float

    def arrival(self, larger: Callable[[Time, Time], Time]) -> Time:
        """When its bytes have arrived. A burst goes at once, and is owed (the generic cell rate algorithm)."""
        return larger(self.least, self.over - self.ahead)


@dataclass(eq=False)
class Wire:
    """A wire. A lane carries one transfer after the other, and the lanes that carry some get equal parts of the wire.

    This is processor sharing: while a lane needs the wire for some seconds, each of the others gets no more than that.

    Args:
        larger: the later one of two times, where there are several ranks for each.
        smaller: the earlier one.
        at: the time at which ``lanes`` holds.
        lanes: what each of them needs, as seconds of the wire alone.
    """

    larger: Callable[[Time, Time], Time]
    smaller: Callable[[Time, Time], Time]
    at: Time = 0.0
    lanes: dict[str, Time] = field(default_factory=dict)
    passing: list[Passing] = field(default_factory=list)

    def add(self, lane: str, start: Time, seconds: Time, least: Time, ahead: float) -> Passing:
        """A transfer that needs the wire for some seconds, from its start on, or from ``at`` if that is later.

        So transfers that are added with later starts, since their lane was taken or for their latency, hold back those
        of other lanes that are added after them.
        """
        self._advance(start)
        self.lanes[lane] = self.lanes.get(lane, 0.0) + seconds
        added = Passing(lane, start, self.lanes[lane], self.at, least, ahead)
        self.passing.append(added)
        for each in self.passing:
            others = [self.smaller(left, each.left) for name, left in self.lanes.items() if name != each.lane]
            over = self.at + each.left + sum(others)
            each.over = each.over + (each.left > 0) * (over - each.over)
        return added

    def begin(self, over: Time) -> None:
        """Begin a step, which is what comes after the end of another one: its lanes may still need the wire."""
        self._advance(over)
        self.at, self.passing = self.at - over, []

    def _advance(self, until: Time) -> None:
        """Come to a later time."""
        until = self.larger(until, self.at)
        for _ in self.lanes:  # each turn one more lane is empty, or the time has come
            busy = [left > 0 for left in self.lanes.values()]
            sharing = self.larger(sum(busy), 1)
            most = (until - self.at) / sharing
            for left in self.lanes.values():
                most = self.smaller(most, left + NEVER * (left <= 0))
            self.at = self.at + most * sharing * (sum(busy) > 0)
            for lane, left in self.lanes.items():
                self.lanes[lane] = self.larger(left - most, 0.0)
            for each in self.passing:
                each.left = self.larger(each.left - most, 0.0)
        self.at = self.larger(until, self.at)
        self.passing = [each for each in self.passing if self._some(each.left > 0)]

    def _some(self, true: Any) -> bool:
        """Whether this is so on some rank."""
        return bool(true.any()) if hasattr(true, "any") else bool(true)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of these spans is under way.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
