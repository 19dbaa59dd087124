"""The verdict of records, in words of the schedule: who waits for whom, and the stragglers that others wait for."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from fshard.reading.files import printable
from fshard.runtime.flight.rank_records import OVER, RankRecord
from fshard.schedule.ops import STEP_KINDS

NEAR = 1.0
"""Seconds in which ranks that wait for the same ones give up."""


def of_one_job(records: Sequence[RankRecord]) -> tuple[list[RankRecord], list[RankRecord]]:
    """The records of the newest job, and those of others that had other numbers of ranks and used the same folder."""
    newest = max(records, key=lambda record: (record.ranks > 0, record.latest))
    ranks = newest.ranks or math.inf  # of a damaged record they are not known
    mine = [record for record in records if record.ranks in (ranks, 0) and record.rank < ranks]
    return mine, [record for record in records if record not in mine]


def verdict(records: Sequence[RankRecord]) -> str:
    """Say who waits for whom, in words of the schedule: when the first rank gave up, if one did; else now."""
    records, others = of_one_job(records)
    first, there = first_lost(records), [record for record in records if record.entries]
    known = {record.rank: until(record, first) for record in there}
    lines = [*_unusable(records, others)]
    if not known:
        return "\n".join([*lines, "no rank has come to an op"])
    unread = [record.rank for record in records if record.damage and not record.entries]
    missing = _missing(records, {*known, *unread})
    lines += [f"{ranks_text(missing)} left no record here"] if missing else []
    gave_up = [rank for rank, record in known.items() if record.lost and record.written <= first + NEAR]
    lines += filter(None, [_awaited(known, missing, gave_up, unread)])
    return "\n".join([*lines, *_rows(there, known, first)])


def _unusable(records: Sequence[RankRecord], others: Sequence[RankRecord]) -> Iterator[str]:
    """List what is wrong with records, and which are of other jobs."""
    yield from (f"{ranks_text([record.rank])}: {record.damage}" for record in records if record.damage)
    for ranks in sorted({record.ranks for record in others}):
        left = [record.rank for record in others if record.ranks == ranks]
        yield f"{ranks_text(left)} of another job, of {ranks or 'more'} ranks: left out"


def _missing(records: Sequence[RankRecord], found: Collection[int]) -> list[int]:
    """The ranks that have left nothing."""
    return [rank for rank in range(max(record.ranks for record in records)) if rank not in found]


def _rows(records: Sequence[RankRecord], known: Mapping[int, RankRecord], first: float) -> Iterator[str]:
    """Say where each rank was when the first one gave up, if one did; else is."""
    newest, when = first, "the first rank gave up"
    if math.isinf(first):
        newest = max(max(record.entries[-1].time, record.written) for record in records)
        when = "the last record was made"
    for record in records:
        entry = known[record.rank].entries[-1]
        age = newest - entry.time
        since = f", for {age:.1f} s when {when}" if age > 0.05 else ""
        since += ", and went on then" if record.entries[-1].time > first else ""
        yield f"  rank {record.rank} is {'' if entry.op == OVER else 'at '}{record.words(entry)}{since}"
        yield from (f"    {printable(line)}" for line in record.reason.splitlines()[:1])


def first_lost(records: Sequence[RankRecord]) -> float:
    """Say when the first rank gave up waiting for others, in the latest runs in which one did; infinity if none did."""
    lost = [record for record in records if record.lost and record.entries]
    latest = max((record.entries[-1].run for record in lost), default=0)
    return min((record.written for record in lost if record.entries[-1].run >= latest - 1), default=math.inf)


def until(record: RankRecord, seconds: float) -> RankRecord:
    """The record as it was at a time: a rank that was late then may have gone on."""
    return replace(record, entries=[entry for entry in record.entries if entry.time <= seconds] or record.entries[:1])


def _awaited(
    known: Mapping[int, RankRecord], absent: Sequence[int], gave_up: Sequence[int], unread: Sequence[int]
) -> str:
    """Say which ranks wait for which others. Those that gave up waited, between steps too, as in a checkpoint."""
    waiting = [rank for rank, record in known.items() if record.waits(record.entries[-1]) or rank in gave_up]
    late = [*absent, *_behind(known, waiting)]
    others = [rank for rank in waiting if rank not in late]
    if late and others:
        return f"{_waiting(others)} for {ranks_text(late)}"
    if unread and waiting:
        return f"whether {_waiting(waiting)} for {ranks_text(unread)} is not known"
    told = any(record.reason for record in known.values())
    if len(waiting) == len(known):
        return "all ranks wait at the same op" + ("" if told else ": what they wait for is on its way")
    return "" if late or told else f"nobody waits: all ranks have ended run {next(iter(known.values())).place[0]}"


def _waiting(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def _behind(known: Mapping[int, RankRecord], waiting: Sequence[int]) -> list[int]:
    """The ranks that have come least far; none where all are at one op and wait there, or have ended."""
    places = {rank: record.place for rank, record in known.items()}
    least = min(places.values())
    if all(place == least for place in places.values()):
        ended = least[1] == math.inf and not waiting
        return [] if ended else [rank for rank in known if rank not in waiting]
    return [rank for rank, place in places.items() if place == least]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_text([3]), ranks_text([0, 1, 4])
    ('rank 3', 'ranks 0, 1 and 4')
    """
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


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
