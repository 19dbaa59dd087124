"""Stragglers: the rank that others wait for where all meet, found in their records, step by step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fshard.runtime.flight.rank_records import RankRecord
from fshard.runtime.flight.verdict import ranks_text
from fshard.schedule.ops import STEP_KINDS

LEAST = 0.05
"""The part of the time from which on a rank that others wait for is a straggler."""


class Waits(NamedTuple):
    """The waits of ranks where all of them meet, by the rank waited for.

    Attributes:
        steps: the runs that all records have.
        seconds: how long these took.
        waited: by rank and kind of op, the mean seconds that the others waited for it.
    """

    steps: int
    seconds: float
    waited: Mapping[int, Mapping[str, float]]


def waits(records: Sequence[RankRecord]) -> Waits:
    """The waits in the runs that the records of all ranks have.

    Whoever waits least where all ranks meet came last: the others waited for it, by how much longer they were there. So
    clocks of hosts need not agree.
    """
    found = [_met(record) for record in records]
    common = set(found[0]).intersection(*found[1:]) if len(found) > 1 else set()
    waited: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for place in sorted(common):
        spans = [seconds[place][1] for seconds in found]
        last = spans.index(min(spans))
        waited[records[last].rank][place[2]] += (sum(spans) - len(spans) * spans[last]) / (len(spans) - 1)
    times = [found[0][place][0] + found[0][place][1] for place in common]
    begun = [found[0][place][0] for place in common]
    return Waits(len({run for run, _, _ in common}), max(times) - min(begun) if times else 0.0, waited)


def straggler(records: Sequence[RankRecord]) -> str:
    """The rank that others wait for most, in words; empty if no two ranks have met."""
    steps, seconds, waited = waits(records) if records else Waits(0, 0.0, {})
    if not steps or seconds <= 0:
        return ""
    rank = max(waited, key=lambda rank: sum(waited[rank].values()))
    total = sum(waited[rank].values())
    share = f"{total:.3g} s of {seconds:.3g} s in {steps} runs"
    if total < LEAST * seconds:
        return f"no straggler: where all ranks meet, others wait most for {ranks_text([rank])}, {share}"
    kinds = ", ".join(f"{time:.3g} s in the {kind}" for kind, time in waited[rank].items() if time > total / 1000)
    return f"the straggler is {ranks_text([rank])}: the others waited {share} for it, {kinds}"


def _met(record: RankRecord) -> dict[tuple[int, int, str], tuple[float, float]]:
    """The meetings of a rank with all others, by run, op and kind of op: the time of each, and its seconds."""
    found = {}
    for entry, following in pairwise(record.entries):
        schedule = record.schedules.get(entry.schedule)
        if schedule is not None and 0 <= entry.op < len(schedule) and schedule[entry.op].kind in STEP_KINDS:
            found[entry.run, entry.op, schedule[entry.op].kind] = entry.time, max(following.time - entry.time, 0.0)
    return found
