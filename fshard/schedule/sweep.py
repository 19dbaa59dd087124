"""The part of checking a schedule that is about memory: ranges of the arena which are alive together are disjoint.

And how a schedule that breaks a rule is shown.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from fshard import errors
from fshard.schedule.schedule import Schedule
from fshard.schedule.text import op_lines

CONTEXT = 4
"""Ops shown on each side of the one that fails."""


def check_memory(schedule: Schedule) -> None:
    """Sweep over the ops with the ranges alive, sorted by offset: each new one must fit in between."""
    memory = schedule.memory
    begin: list[list[str]] = [[] for _ in schedule.ops]
    end: list[list[str]] = [[] for _ in schedule.ops]
    for item in memory.offsets:
        lives = memory.lifetimes[item]
        if memory.offset(item) < 0 or memory.offset(item) + memory.sizes[item] > memory.arena_bytes:
            raise broken(schedule, lives[0][0], f"{item} lies outside of the arena")
        for first, last in lives if memory.sizes[item] else ():
            begin[first].append(item)
            end[last].append(item)
    alive: list[tuple[int, int, str]] = []
    for at in range(len(schedule.ops)):
        for item in begin[at]:
            entry = (memory.offset(item), memory.offset(item) + memory.sizes[item], item)
            place = bisect_left(alive, entry)
            if place and alive[place - 1][1] > entry[0]:
                raise broken(schedule, at, f"{item} overlaps {alive[place - 1][2]} in the arena")
            if place < len(alive) and alive[place][0] < entry[1]:
                raise broken(schedule, at, f"{item} overlaps {alive[place][2]} in the arena")
            insort(alive, entry)
        for item in end[at]:
            alive.remove((memory.offset(item), memory.offset(item) + memory.sizes[item], item))


def broken(schedule: Schedule, at: int, problem: str) -> errors.ScheduleError:
    """The error of a schedule that breaks a rule at this op."""
    lines = op_lines(schedule.ops, schedule.accumulate)
    return errors.broken_schedule(problem, _excerpt(lines, at))


def _excerpt(lines: Sequence[str], at: int) -> list[str]:
    shown = range(max(at - CONTEXT, 0), min(at + CONTEXT + 1, len(lines)))
    return [f"{'->' if i == at else '  '} {lines[i]}" for i in shown]
