"""An executor that notes what each op takes: on the wall, of its thread's processor, and of the whole process'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import TypeVar

from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.route import Route, ScheduleActions
from fshard.runtime.execution.signals import Shield

T = TypeVar("T")

Reading = tuple[float, float, float]
"""Seconds on the wall, of this thread and of the process."""


def read() -> Reading:
    """The clocks now."""
    return perf_counter(), thread_time(), process_time()


@dataclass
class Stopwatch:
    """Begin and end of the ops of a step, by their numbers. A compute op ends where ``settle`` follows it."""

    begins: dict[int, Reading] = field(default_factory=dict)
    ends: dict[int, Reading] = field(default_factory=dict)
    open: int = -1

    def begin(self, op: int) -> None:
        """An op begins."""
        self.begins[op] = read()

    def end(self, op: int) -> None:
        """An op is over."""
        self.ends[op] = read()

    def enter(self, op: int) -> None:
        """A compute op begins: the one before is over, if nothing has said so."""
        self.leave()
        self.begin(op)
        self.open = op

    def leave(self) -> None:
        """The compute op that runs, if one does, is over."""
        if self.open >= 0:
            self.end(self.open)
            self.open = -1


EMPTY = 200
"""Ops that do nothing, whose median tells what reading the clocks takes."""


def readings() -> tuple[Reading, Reading]:
    """Return what an op that does nothing seems to take, and what lies between it and the next: the clocks themselves.

    Those of threads and processes are calls of the kernel. With some sixty ops in ten milliseconds they are two
    hundredths of a step.

    >>> within, after = readings()
    >>> all(seconds > 0 for seconds in within + after)
    True
    """
    watch = Stopwatch()
    for op in range(EMPTY):
        watch.begin(op)
        watch.end(op)
    within = [_between(watch.begins[op], watch.ends[op]) for op in range(EMPTY)]
    after = [_between(watch.ends[op], watch.begins[op + 1]) for op in range(EMPTY - 1)]
    return _medians(within), _medians(after)


def _between(begin: Reading, end: Reading) -> Reading:
    return end[0] - begin[0], end[1] - begin[1], end[2] - begin[2]


def _medians(spans: Sequence[Reading]) -> Reading:
    wall, thread, process = zip(*spans, strict=True)
    return median(wall), median(thread), median(process)


class Timed(Scheduled):
    """Runs the ops of a schedule, and times them."""

    def __init__(self, route: Route, actions: ScheduleActions, shield: Shield | None = None) -> None:
        super().__init__(route, actions, shield)
        self.watch = Stopwatch()

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        self.watch.leave()
        super().reach(kind, unit, index)
        self.watch.enter(self.cursor - 1)

    def settle(self) -> None:
        """Issue the ops that need not wait."""
        self.watch.leave()
        super().settle()

    def finish(self) -> None:
        """Run everything before the consensus."""
        self.watch.leave()
        super().finish()

    def _perform(self, run: Callable[[], T]) -> T:
        at = self.cursor
        self.watch.begin(at)
        found = super()._perform(run)
        self.watch.end(at)
        return found

    def _update(self) -> None:
        first, begun = self.cursor, read()
        super()._update()
        over = read()
        count = self.cursor - first
        for number in range(count):  # those that were made together share the time
            cut = [a + (b - a) * number / count for a, b in zip(begun, over, strict=True)]
            till = [a + (b - a) * (number + 1) / count for a, b in zip(begun, over, strict=True)]
            self.watch.begins[first + number] = cut[0], cut[1], cut[2]
            self.watch.ends[first + number] = till[0], till[1], till[2]
