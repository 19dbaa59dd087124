"""Costs from measured steps: units, updates and the host as they were, transfers as lines through their sizes.

What is fitted were steps of the ``APART`` policy, in which every transfer is waited for as soon as it has begun, so
that compute and transfers do not disturb each other. What a link does without such pauses is measured apart: a series
of transfers tells its steady rate, and how many bytes go before that at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import fmean, median
from types import MappingProxyType

from fshard.errors import PlanError
from fshard.schedule.costs import Costs, Link
from fshard.schedule.ops import COMPUTE_KINDS, STEP_KINDS
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited, started

QUARTILE, LEAST = (0.1, 0.4), 3
"""Which steps count, by their place among all of them in the order of their times; and how many at least."""

TURNS = 3
"""Steps until bursts are as in all later ones."""

APART = Policy(prefetch=0, reduces=0)
"""The policy of steps that are measured."""


@dataclass(frozen=True)
class OpTime:
    """What an op took on one rank, in seconds: on the wall, of its thread, of the whole process.

    Between it and the next op lies code outside of units, or of the runtime: ``gap`` seconds on the wall, and
    ``gap_thread`` of the thread.
    """

    wall: float
    thread: float
    process: float
    gap: float
    gap_thread: float = 0.0


Row = Sequence[OpTime]
"""The ops of a step."""


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
    fields = ("wall", "thread", "process", "gap", "gap_thread")
    columns = zip(*rows, strict=True)
    return [OpTime(*(fmean([getattr(time, name) for time in column]) for name in fields)) for column in columns]


@dataclass(frozen=True)
class Stream:
    """What a link does that is kept busy.

    Attributes:
        rate: bytes a second that a rank sends, once they are all the same.
        burst: bytes that have gone at once before.
        each: seconds of its thread for the message to a peer, and that from it.
        peers: how many it has.
        together: transfers of a communicator that may be on their way at once.
    """

    rate: float
    burst: float
    each: float = 0.0
    peers: int = 0
    together: int = 1


NO_STREAMS: Mapping[str, Stream] = MappingProxyType({})

SLOWER = 1.1
"""A link is shaped if its steady rate is less than that of transfers apart from each other by more than this factor."""

WORKING = 2.0
"""A link that takes so many times what its threads do is slow by itself: with two transfers under way they overlap."""


SETTLED = 1.25
"""A series has come to the steady rate if its second half was no faster than this, compared with that rate."""


def settled(series: Sequence[Sequence[float]], sent: int) -> Stream:
    """What a link does, from series of equal transfers, which come to its steady rate in the longest ones at least.

    Args:
        series: when each transfer of a series had arrived, in seconds from its begin.
        sent: bytes that a rank sends for each.

    >>> settled([[0.0, 0.0, 0.5, 1.0]], 100)
    Stream(rate=200.0, burst=200.0, each=0.0, peers=0, together=1)
    """
    most = max(map(len, series))
    rate, burst = max(_steady(times, sent) for times in series if len(times) == most), 0.0
    for times in series:
        burst += len(times) * sent - rate * times[-1]
        if _second_half(times, sent) <= SETTLED * rate:
            break
    return Stream(rate, max(burst, 0.0))


def _steady(times: Sequence[float], sent: int) -> float:
    """Bytes a second in the second half: the median over its stretches, for in some of them something else may run."""
    half, width = len(times) // 2, max(len(times) // 4, 1)
    spans = [times[at + width] - times[at] for at in range(half - 1, len(times) - width)]
    return width * sent / max(median(spans), 1e-9)


def _second_half(times: Sequence[float], sent: int) -> float:
    """Bytes a second."""
    half = len(times) // 2
    return (len(times) - half) * sent / max(times[-1] - times[half - 1], 1e-9)


@dataclass(frozen=True)
class Sample:
    """What one transfer took: the wall from its start to its arrival, and processors. ``begun`` is when it started."""

    begun: float
    sent: int
    starting: float
    carried: float
    collecting: float
    beside: float


def fit(
    schedule: Schedule,
    ranks: Sequence[Row],
    host: float,
    processors: float,
    machine: str,
    streams: Mapping[str, Stream] = NO_STREAMS,
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
        links[key], start, wait = _line(samples)
        seconds[kind, ""], seconds[f"wait {kind}", ""] = start, wait
    period = host + fmean([sum(time.wall + time.gap for time in row) for row in ranks])
    for axes, stream in streams.items():
        links |= _busy(axes, stream, links, found, slow, period)
    for key in found:
        links.setdefault(key.partition(" over ")[2], links[key])
    around = {"host": host / slow, "processors": processors, "machine": machine, "ranks": len(ranks)}
    return Costs(seconds, links=links, **around, updates_by_bytes=_by_bytes(schedule, seconds))  # type: ignore[arg-type]


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
    """What each transfer took, by kind and axes."""
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
    """What a transfer took, from its start to its wait.

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


def _line(samples: Sequence[Sample]) -> tuple[Link, float, float]:
    """The link of some transfers, and what their starts and waits take beside what bytes do."""
    sizes = [sample.sent for sample in samples]
    start, sending = line(sizes, [sample.starting for sample in samples])
    latency, carrying = line(sizes, [sample.carried for sample in samples])
    wait, taking = line(sizes, [sample.collecting for sample in samples])
    beside = sum(sample.beside for sample in samples) / sum(sizes)
    return Link(_rate(carrying), latency, sending, beside, taking), start, wait


def _rate(carrying: float) -> float:
    """Bytes a second, of the seconds for each."""
    return 1 / carrying if carrying > 0 else math.inf


def _busy(
    axes: str,
    stream: Stream,
    links: Mapping[str, Link],
    found: Mapping[str, Sequence[Sample]],
    slow: float,
    period: float,
) -> dict[str, Link]:
    """The links over some axes, with what they do that are kept busy. Steps take ``period`` seconds."""
    kinds = {key: link for key, link in links.items() if key.endswith(f" over {axes}")}
    own = {key: replace(link, each=stream.each, peers=stream.peers) for key, link in kinds.items()}
    if stream.rate == math.inf:
        return _copied(own, slow)
    return _carried(own, stream, found, slow, period) if own else {}


def _copied(own: Mapping[str, Link], slow: float) -> dict[str, Link]:
    """Links whose bytes are copied by the thread that computes, so that nothing is on its way.

    Where ranks share a processor, the others compute while one waits, and that is counted for them.
    """
    if slow == 1.0:
        return dict(own)
    return {key: replace(link, bytes_per_s=math.inf, latency=0.0) for key, link in own.items()}


def _carried(
    own: Mapping[str, Link], stream: Stream, found: Mapping[str, Sequence[Sample]], slow: float, period: float
) -> dict[str, Link]:
    """Links that carry bytes while the thread computes."""
    every = [sample for key in own for sample in found[key]]
    ahead = fmean([sample.sent - stream.rate * sample.carried for sample in every])
    shaped = all(_shaped(link, stream, slow) for link in own.values())
    bound = 1 / stream.rate > WORKING * max(_work(link) for link in own.values()) * slow  # by the wire, not by threads
    if ahead > 0 and (_even(every, stream) or (bound and not (shaped and stream.burst >= ahead))):
        same = partial(replace, bytes_per_s=stream.rate, burst=ahead, latency=0.0, peak=math.inf)
        return {key: same(link, together=stream.together) for key, link in own.items()}
    if not shaped:
        return {key: _bounded(link, found[key], stream) for key, link in own.items()}
    late = _delayed(every, stream, period)
    return {key: _burst(link, [each for each in found[key] if each not in late], stream) for key, link in own.items()}


def _even(samples: Sequence[Sample], stream: Stream) -> bool:
    """Whether transfers apart from each other have the steady rate, and are ahead of it by the same bytes.

    That says the slope of their times by size: the median of those of all pairs (Theil and Sen), for some waits are
    longer by what else the machine does.
    """
    pairs = [(a, b) for a, b in combinations(samples, 2) if a.sent != b.sent]
    slopes = [(a.carried - b.carried) / (a.sent - b.sent) for a, b in pairs]
    return bool(slopes) and 1 / SLOWER < median(slopes) * stream.rate < SLOWER


def _bounded(link: Link, samples: Sequence[Sample], stream: Stream) -> Link:
    """A link that is not shaped: what it reaches when it is kept busy, and with one transfer, which may be far less."""
    sizes = [sample.sent for sample in samples]
    latency, carrying = line(sizes, [sample.carried for sample in samples], 1 / stream.rate)
    peak = _rate(carrying)
    return replace(link, bytes_per_s=max(stream.rate, peak), latency=latency, peak=peak, together=stream.together)


def _shaped(link: Link, stream: Stream, slow: float) -> bool:
    """Whether a link is slower, when it is kept busy, than all that a transfer takes apart from others."""
    return 1 / stream.rate > SLOWER * (_work(link) * slow + 1 / link.bytes_per_s)


def _work(link: Link) -> float:
    """Seconds of all threads for a byte."""
    return link.sending + link.beside + link.taking


def _delayed(samples: Sequence[Sample], stream: Stream, period: float) -> set[Sample]:
    """The transfers of a step that waited for the steady rate of their link, step after step."""
    late: set[Sample] = set()
    steady = 0.0
    for turn in range(TURNS):
        for sample in sorted(samples, key=lambda each: each.begun):
            begun = turn * period + sample.begun
            steady = max(steady, begun) + sample.sent / stream.rate
            if turn == TURNS - 1 and steady - stream.burst / stream.rate - begun > sample.carried / 2:
                late.add(sample)
    return late


def _burst(link: Link, free: Sequence[Sample], stream: Stream) -> Link:
    """A link that is shaped, given the transfers that went at once."""
    latency, carrying = 0.0, 0.0
    if free:
        latency, carrying = line([sample.sent for sample in free], [sample.carried for sample in free])
    rate, burst, together = stream.rate, stream.burst, stream.together
    return replace(link, bytes_per_s=rate, latency=latency, burst=burst, peak=_rate(carrying), together=together)


def line(xs: Sequence[float], ys: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Intercept and slope of the line of least squares, neither of them negative. Its sum over all is that of ``ys``.

    Args:
        xs: the arguments, such as the sizes of transfers.
        ys: the value at each.
        least: the least slope, unless the intercept would be negative with it.

    >>> line([1, 2, 3], [3.0, 5.0, 7.0])
    (1.0, 2.0)
    >>> line([4, 4], [2.0, 2.0])
    (0.0, 0.5)
    >>> line([1, 3], [5.0, 5.0], least=1.0)
    (3.0, 1.0)
    """
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    known, slope = spread > 1e-12 * len(xs) * mean_x**2, least
    if known:
        slope = max(sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread, least)
    if (known or least) and mean_y >= slope * mean_x:
        return round(mean_y - slope * mean_x, 12), float(f"{slope:.12g}")
    return 0.0, mean_y / mean_x


def times_of(rows: Sequence[Sequence[float]]) -> Iterator[OpTime]:
    """Ops from their numbers, as ranks exchange them."""
    for row in rows:
        yield OpTime(*row)
