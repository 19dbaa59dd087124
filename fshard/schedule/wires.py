"""Wires: what transfers of several communicators share, as connections do that get equal parts of a link."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard.schedule.link import Link

Time = Any
"""Seconds: a float, or a tensor with one for each rank."""

NEVER = 1e18
"""More seconds than anything takes: the time of what is not known yet."""


@dataclass(eq=False)
class Passing:
    """A transfer on a wire.

    Attributes:
        lane: the communicator that it belongs to.
        link: what carries it.
        sent: its bytes.
        come: when all ranks that take part have come to it.
        turn: when the threads that carry it have a processor, at the latest.
        place: its number in its lane.
        start: when its first byte goes.
        left: from then on, what the wire must do for its lane until it is over, as seconds of the wire alone.
        arrival: when its bytes have arrived.
    """

    lane: str
    link: Link
    sent: int
    come: Time
    turn: Time
    place: int
    start: Time = NEVER
    left: Time = 0.0
    arrival: Time = NEVER


@dataclass(eq=False)
class SharedWire:
    """A wire. A lane carries one transfer after the other, and the lanes that carry some get equal parts of the wire.

    This is processor sharing: while a lane needs the wire for some seconds, each of the others gets no more than that.
    Time goes from event to event, which are starts and arrivals, and no further than it is known what else is issued.

    Args:
        larger: the later one of two times, where there are several ranks for each.
        smaller: the earlier one.
        at: the time of the last event.
        lanes: the transfers of each lane, in the order of issue.
        needs: what each lane needs still, as seconds of the wire alone.
        waiting: the transfers that have not started on all ranks.
        under_way: those that have started on some, and not arrived on all.
        events: when the waiting start, those under way arrive, and what comes first, if nothing more is issued.
    """

    larger: Callable[[Time, Time], Time]
    smaller: Callable[[Time, Time], Time]
    at: Time = 0.0
    lanes: dict[str, list[Passing]] = field(default_factory=dict)
    needs: dict[str, Time] = field(default_factory=dict)
    waiting: list[Passing] = field(default_factory=list)
    under_way: list[Passing] = field(default_factory=list)
    events: tuple[list[Time], list[Time], Time] | None = None

    def add(self, lane: str, link: Link, sent: int, now: Time, come: Time, turn: float = 0.0) -> Passing:
        """A transfer that is issued now, or at the last event if that is later.

        It starts when its ranks have come, its threads have had their ``turn`` and the lane has room for it, after the
        link's latency.
        """
        self._until(now)
        own = self.lanes.setdefault(lane, [])
        self.needs.setdefault(lane, 0.0)
        added = Passing(lane, link, sent, come, come + turn, len(own))
        own.append(added)
        starts, arrivals, first = self._coming()
        self.waiting.append(added)
        starts.append(self._ready(added))
        self.events = starts, arrivals, self.smaller(first, starts[-1])
        return added

    def arrival(self, passing: Passing) -> Time:
        """Say when a transfer arrives, if nothing more is issued until then."""
        while _on_some(passing.arrival >= NEVER):
            self._next(passing.arrival)
        return passing.arrival

    def awaited(self, passing: Passing, now: Time, wires: Iterable["SharedWire"]) -> Time:
        """The same, if the device waits for it from now on. Meanwhile threads have its processor, on all its wires."""
        self._until(now)
        waits = as_number(passing.arrival >= NEVER)
        if _on_some(waits > 0):
            for wire in wires:
                wire._hurry(now, waits)
        return self.arrival(passing)

    def _hurry(self, now: Time, waits: Time) -> None:
        """Give what waits its turn, where a device waits."""
        self._until(now)
        for each in self.waiting:
            sooner = self.smaller(each.turn, self.larger(each.come, now))
            each.turn = each.turn + waits * (sooner - each.turn)
            self.events = None

    def begin(self, over: Time) -> None:
        """Begin a step, which is what comes after the end of another one: its lanes may still need the wire."""
        self._until(over)
        self._pass(over)
        self.at, self.lanes, self.waiting, self.under_way, self.events = self.at - over, {}, [], [], None

    def _until(self, now: Time) -> None:
        """Come to all events until a time."""
        while _on_some(self._coming()[2] <= now):
            self._next(now)

    def _coming(self) -> tuple[list[Time], list[Time], Time]:
        """The events that come."""
        if self.events is None:
            starts = [self._ready(each) for each in self.waiting]
            arrivals = [self._arrives(each) for each in self.under_way]
            self.events = starts, arrivals, functools.reduce(self.smaller, [*starts, *arrivals], NEVER)
        return self.events

    def _next(self, limit: Time) -> None:
        """Come to the next event, or to a time that is sooner."""
        starts, arrivals, first = self._coming()
        self._pass(self.larger(self.smaller(first, limit), self.at))
        for each, arrival in zip(self.under_way, arrivals, strict=True):
            each.arrival = self.smaller(each.arrival, arrival + NEVER * as_number(arrival > self.at))
        for each, start in zip(self.waiting, starts, strict=True):
            self._start(each, start)
        self.under_way = [each for each in self.under_way if _on_some(each.arrival >= NEVER)]
        self.waiting = [each for each in self.waiting if _on_some(each.start >= NEVER)]
        self.events = None

    def _start(self, passing: Passing, start: Time) -> None:
        """Start a transfer where its time has come."""
        starts = as_number(start <= self.at)
        if not _on_some(starts > 0):
            return
        if passing not in self.under_way:
            self.under_way.append(passing)
        needs = self.needs[passing.lane] + passing.sent / passing.link.bytes_per_s * starts
        self.needs[passing.lane] = needs
        passing.left = passing.left + needs * starts
        passing.start = self.smaller(passing.start, start + NEVER * (1 - starts))

    def _ready(self, passing: Passing) -> Time:
        """Say when a transfer starts, if it has not yet, and if that is known."""
        own, place = self.lanes[passing.lane], passing.place
        behind = place - passing.link.together
        ready = self.larger(passing.turn, own[behind].arrival if behind >= 0 else 0.0) + passing.link.latency
        if place:
            ready = self.larger(ready, own[place - 1].start)
        return ready + NEVER * as_number(passing.start < NEVER)

    def _arrives(self, passing: Passing) -> Time:
        """Say when a transfer that has started arrives, if no other starts before.

        The bytes of a burst go at once, and are owed (the generic cell rate algorithm).
        """
        link, over = passing.link, self.at + passing.left
        for lane, left in self.needs.items():
            if lane != passing.lane:
                over = over + self.smaller(left, passing.left)
        arrives = self.larger(passing.start + passing.sent / link.peak, over - link.burst / link.bytes_per_s)
        return arrives + NEVER * as_number(passing.arrival < NEVER)

    def _pass(self, until: Time) -> None:
        """Let time pass."""
        for _ in self.needs:  # each turn one more lane is empty, or the time has come
            if not _on_some(self.at < until):
                break
            busy = [as_number(left > 0) for left in self.needs.values()]
            sharing = self.larger(sum(busy), 1)
            most = (until - self.at) / sharing
            for left in self.needs.values():
                most = self.smaller(most, left + NEVER * as_number(left <= 0))
            self.at = self.at + most * sharing * as_number(sum(busy) > 0)
            for lane, left in self.needs.items():
                self.needs[lane] = self.larger(left - most, 0.0)
            for each in self.under_way:
                each.left = self.larger(each.left - most, 0.0)
        self.at = self.larger(self.at, until)


def as_number(true: Any) -> Time:
    """1 where this is so, 0 where it is not. (A bool tensor times a number would be of single precision.)"""
    return float(true) if isinstance(true, bool) else true.double()


def _on_some(true: Any) -> bool:
    """Tell whether this is so on some rank."""
    return true if isinstance(true, bool) else bool(true.any())


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
