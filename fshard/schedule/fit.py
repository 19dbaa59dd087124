"""Costs from measured steps: units, updates and the host as they were, transfers as lines through their sizes.

What is fitted were steps of the ``APART`` policy, in which every transfer is waited for as soon as it has begun, so
that compute and transfers do not disturb each other. How much they do is what steps of ``BESIDE`` take more of
processors, or less. What a link does without pauses is measured apart.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fshard.errors import PlanError
from fshard.schedule.clock import Clock
from fshard.schedule.costs import Costs
from fshard.schedule.fit_links import NO_STREAMS, LinkStream, Sample, apart, busy, line
from fshard.schedule.link import Link
from fshard.schedule.ops import COMPUTE_KINDS, STEP_KINDS
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited, started

QUARTILE, LEAST = (0.1, 0.4), 3
"""Which steps count, by their place among all of them in the order of their times; and how many at least."""

APART = Policy(prefetch=0, reduces=0)
"""The policy of steps that are measured."""

BESIDE = Policy(prefetch=1)
"""That of steps whose transfers run beside compute, to see what they take from it."""


@dataclass(frozen=True)
class OpTime:
    """The times of an op on one rank, in seconds: on the wall, of its thread, of the whole process.

    Between it and the next op lies code outside of units, or of the runtime: ``gap`` seconds on the wall,
    ``gap_thread`` of the thread, and ``gap_process`` of the process.
    """

    wall: float
    thread: float
    process: float
    gap: float
    gap_thread: float = 0.0
    gap_process: float = 0.0


Row = Sequence[OpTime]
"""The ops of a step."""


@dataclass(frozen=True)
class Overlap:
    """Steps whose transfers ran beside compute: their schedule, and what its ops took on each rank."""

    schedule: Schedule
    ranks: Sequence[Row]


def counted(totals: Sequence[Sequence[float]]) -> list[int]:
    """The numbers of the steps that count: those around the lower quartile, by the slowest rank.

    Processors of shared machines are taken away, for milliseconds or for seconds: that makes steps slower and never
    faster, so the faster ones say most. But the fastest alone are luck, and the more are made, the faster they get.
    Contests go by the lower quartile, too.

    Args:
        totals: the seconds of each step, on each rank.

    >>> counted([[5.0, 1.0, 9.0, 2.0, 4.0], [5.0, 2.0, 1.0, 1.0, 4.0]])
    [1, 3, 4]
    """
    slowest = [max(column) for column in zip(*totals, strict=True)]
    order = sorted(range(len(slowest)), key=slowest.__getitem__)
    begin, end = (int(place * len(order)) for place in QUARTILE)
    return sorted(order[begin : max(end, begin + LEAST)])


def mean(rows: Sequence[Row]) -> list[OpTime]:
    """The means of some steps. Medians of ops would not do: now one op is late and now another."""
    fields = ("wall", "thread", "process", "gap", "gap_thread", "gap_process")
    columns = zip(*rows, strict=True)
    return [OpTime(*(fmean([getattr(time, name) for time in column]) for name in fields)) for column in columns]


def fit(
    schedule: Schedule,
    ranks: Sequence[Row],
    host: float,
    processors: float,
    machine: str,
    streams: Mapping[str, LinkStream] = NO_STREAMS,
    overlap: Overlap | None = None,
) -> Costs:
    """The costs that a measured schedule had.

    Where ranks share processors, ops cost what their thread took: on the wall they last longer, since others compute
    meanwhile, and the simulation makes them as much longer again.

    Args:
        schedule: that of the steps.
        ranks: what its ops took, on each rank.
        host: seconds of a step before its first op and after its last.
        processors: processors that a rank has.
        machine: what this was measured on.
        streams: what links do that are kept busy, by axes.
        overlap: steps whose transfers ran beside compute. Without them, transfers take from it what threads took while
            they were waited for.

    Raises:
        PlanError: a rank's steps had another number of ops.
    """
    if any(len(row) != len(schedule) for row in ranks):
        raise PlanError(f"{[len(row) for row in ranks]} ops were measured of a schedule of {len(schedule)}")
    slow = max(1.0, 1.0 / processors)
    seconds = {op: fmean(times) for op, times in _device(schedule, ranks, shared=slow > 1.0).items()}
    found = _samples(schedule, ranks, slow)
    links: dict[str, Link] = {}
    for key, samples in found.items():
        kind, _, axes = key.partition(" over ")
        links[key], start, wait = apart(samples)
        seconds[kind, ""], seconds[f"wait {kind}", ""] = start, wait
    period = host + fmean([sum(time.wall + time.gap for time in row) for row in ranks])
    for axes, stream in streams.items():
        links |= busy(axes, stream, links, found, slow, period)
    for key in found:
        links.setdefault(key.partition(" over ")[2], links[key])
    around = {"host": host / slow, "processors": processors, "machine": machine, "ranks": len(ranks)}
    costs = Costs(seconds, links=links, **around, updates_by_bytes=_by_bytes(schedule, seconds))  # type: ignore[arg-type]
    return replace(costs, links=_beside(costs, schedule, ranks, overlap)) if overlap else costs


def _beside(costs: Costs, schedule: Schedule, ranks: Sequence[Row], overlap: Overlap) -> dict[str, Link]:
    """The links, with what steps take more, or less, whose transfers run beside compute."""
    other, own = (Clock(each, replace(costs, processors=1.0)) for each in (overlap.schedule, schedule))
    moves = [other.transfers.get((op.kind, op.target)) for op in overlap.schedule]
    begun = [(at, move.sent, costs.carrier(move)[1]) for at, move in enumerate(moves) if move is not None]
    carried = [(size, link) for _, size, link in begun if not _copied(link)]
    foreseen = other.run().compute - own.run().compute
    if carried:
        copied = sum(link.work(size) for _, size, link in begun if _copied(link))
        return _by_threads(costs.links, carried, max(_more(schedule, ranks, overlap) - foreseen - copied, 0.0))
    met = [_at_once(overlap.schedule, at) for at, _, link in begun if link.shared_memory]
    return _by_copies(costs.links, met.count(False), _longer(ranks, overlap) - foreseen)


def _by_threads(links: Mapping[str, Link], carried: Sequence[tuple[int, Link]], taken: float) -> dict[str, Link]:
    """The links, if the transfers that threads carry take so much from processors.

    Those threads are the smaller part of it: the kernel's work for what arrives counts for the thread that it
    interrupts, and data leave caches. Where each transfer is waited for, most of that falls into waits. Messages take
    of it what they usually do, or all of it if that is less; bytes take the rest.
    """
    messages = sum(link.work(0) for _, link in carried)
    part = min(taken / messages, 1.0) if messages else 1.0
    each = max(taken - messages, 0.0) / sum(size for size, _ in carried)
    changed = {key: replace(link, beside=each, around=part * link.around) for key, link in links.items()}
    return {key: link if _copied(link) else changed[key] for key, link in links.items()}


def _by_copies(links: Mapping[str, Link], count: int, taken: float) -> dict[str, Link]:
    """The links, if so many copies that are not waited for at once take so much more or less: no rank sleeps there."""
    ahead = taken / count if count else 0.0
    return {key: replace(link, ahead=ahead) if link.shared_memory else link for key, link in links.items()}


def _at_once(schedule: Schedule, at: int) -> bool:
    """Tell whether a transfer is waited for as soon as it has begun."""
    row = awaited(schedule[at + 1].kind)
    return row is not None and (row.name, schedule[at + 1].target) == (schedule[at].kind, schedule[at].target)


def _copied(link: Link) -> bool:
    """Tell whether the thread that computes copies what is sent, so that nothing is on its way."""
    return link.shared_memory or link.bytes_per_s == math.inf


def _more(schedule: Schedule, ranks: Sequence[Row], overlap: Overlap) -> float:
    """Return what steps with overlap take more of processors than the ops of others do apart from transfers."""
    spent = fmean([sum(time.process + time.gap_process for time in row) for row in overlap.ranks])
    return spent - fmean([_apart(schedule, row) for row in ranks])


def _longer(ranks: Sequence[Row], overlap: Overlap) -> float:
    """Return what steps with overlap take more of the thread that computes and copies.

    Threads that compute with it do not count: they may spin while it waits, and take no copies.
    """
    spent, apart = (
        fmean([sum(time.thread + time.gap_thread for time in row) for row in rows]) for rows in (overlap.ranks, ranks)
    )
    return spent - apart


def _apart(schedule: Schedule, row: Row) -> float:
    """Return what the ops of a step took of processors, less what other threads did while a transfer was on its way."""
    moving = [started(op.kind) or awaited(op.kind) for op in schedule]
    own = [time.thread if moves else time.process for moves, time in zip(moving, row, strict=True)]
    return sum(own) + sum(time.gap_process for time in row)


def _by_bytes(schedule: Schedule, seconds: Mapping[tuple[str, str], float]) -> float:
    """The part of the time of updates that goes by the bytes of shards: all of it, if they are of one size."""
    took = [(group.shard_bytes, seconds.get(("update", group.name), 0.0)) for group in schedule.groups]
    took = [(size, each) for size, each in took if size and each > 0]
    if not took:
        return 0.0
    sizes, times = [size for size, _ in took], [each for _, each in took]
    _, slope = line(sizes, times)
    return min(slope * sum(sizes) / sum(times), 1.0)


def _device(schedule: Schedule, ranks: Sequence[Row], shared: bool) -> dict[tuple[str, str], list[float]]:
    """The times of ops that are no transfers. What code outside of units takes belongs to the compute op before it."""
    took, between = ("thread", "gap_thread") if shared else ("wall", "gap")
    found: dict[tuple[str, str], list[float]] = {}
    last: tuple[str, str] | None = None
    for at, op in enumerate(schedule):
        seconds = fmean([getattr(row[at], took) for row in ranks])
        gap = fmean([getattr(row[at], between) for row in ranks])
        key = op.kind, op.target
        if op.kind in COMPUTE_KINDS or op.kind in STEP_KINDS or op.kind == "update":
            found.setdefault(key, []).append(seconds)
            last = key if op.kind in COMPUTE_KINDS or last is None else last
        elif op.kind in ("free", "reshard"):
            found.setdefault((op.kind, ""), []).append(seconds)
        if last is not None:
            found[last][-1] += gap
    return found


def _samples(schedule: Schedule, ranks: Sequence[Row], slow: float) -> dict[str, list[Sample]]:
    """Return what each transfer took, by kind and axes."""
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers}
    under_way: dict[tuple[str, str], int] = {}
    found: dict[str, list[Sample]] = {}
    for at, op in enumerate(schedule):
        row = awaited(op.kind)
        if started(op.kind):
            under_way[op.kind, op.target] = at
        elif row is not None:
            begun, move = under_way.pop((row.name, op.target)), moves[row.name, op.target]
            if move.sent and move.row.link:
                found.setdefault(f"{move.kind} over {move.axes}", []).append(_sample(move, ranks, (begun, at), slow))
    return found


def _sample(move: Transfer, ranks: Sequence[Row], ops: tuple[int, int], slow: float) -> Sample:
    """Return what a transfer took, from its start to its wait.

    What is not of the thread that computes counts as the way of the bytes: other threads may begin to carry them before
    the start is over, and ranks that come first wait for the last one, in each step another. Where ranks share a
    processor, the one that waited least counts, since the others compute while one waits.
    """
    begun, over = ops
    starting = fmean([row[begun].thread for row in ranks])
    collecting = fmean([row[over].thread for row in ranks])
    walls = [sum(time.wall for time in row[begun : over + 1]) for row in ranks]  # gaps are of the compute before
    beside = [sum(t.process - t.thread for t in row[begun : over + 1]) for row in ranks]
    first = fmean([sum(t.wall + t.gap for t in row[:begun]) for row in ranks]) + starting
    waited = fmean(walls) if slow == 1.0 else min(walls)
    carried = max(waited - slow * (starting + collecting), 0.0)
    return Sample(first, move.sent, starting, carried, collecting, max(fmean(beside), 0.0))


def times_of(rows: Sequence[Sequence[float]]) -> Iterator[OpTime]:
    """Ops from their numbers, as ranks exchange them."""
    for row in rows:
        yield OpTime(*row)
