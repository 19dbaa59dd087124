"""What links do: lines through the sizes of transfers apart from each other, and series of transfers without a pause.

A series tells a link's steady rate, and how many bytes go before that at once. Neither shows where each transfer is
waited for before the next one begins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import fmean, median
from types import MappingProxyType

from fshard.schedule.link import Link

TURNS = 3
"""Steps until bursts are as in all later ones."""


@dataclass(frozen=True)
class LinkStream:
    """The ways of a link that is kept busy.

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


NO_STREAMS: Mapping[str, LinkStream] = MappingProxyType({})

SLOWER = 1.1
"""A link is shaped if its steady rate is less than that of transfers apart from each other by more than this factor."""

WORKING = 2.0
"""A link that takes so many times what its threads do is slow by itself: with two transfers under way they overlap."""


SETTLED = 1.25
"""A series has come to the steady rate if its second half was no faster than this, compared with that rate."""


def settled(series: Sequence[Sequence[float]], sent: int) -> LinkStream:
    """Fit what a link does to series of equal transfers, which come to its steady rate in the longest ones at least.

    Args:
        series: when each transfer of a series had arrived, in seconds from its begin.
        sent: bytes that a rank sends for each.

    >>> settled([[0.0, 0.0, 0.5, 1.0]], 100)
    LinkStream(rate=200.0, burst=200.0, each=0.0, peers=0, together=1)
    """
    most = max(map(len, series))
    rate, burst = max(_steady(times, sent) for times in series if len(times) == most), 0.0
    for times in series:
        burst += len(times) * sent - rate * times[-1]
        if _second_half(times, sent) <= SETTLED * rate:
            break
    return LinkStream(rate, max(burst, 0.0))


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
    """The time of one transfer: the wall from its start to its arrival, and processors. It began at ``begun``."""

    begun: float
    sent: int
    starting: float
    carried: float
    collecting: float
    beside: float


def apart(samples: Sequence[Sample]) -> tuple[Link, float, float]:
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


def busy(
    axes: str,
    stream: LinkStream,
    links: Mapping[str, Link],
    found: Mapping[str, Sequence[Sample]],
    slow: float,
    period: float,
) -> dict[str, Link]:
    """The links over some axes, with what they do that are kept busy. Steps take ``period`` seconds."""
    kinds = {key: link for key, link in links.items() if key.endswith(f" over {axes}")}
    copied = stream.rate == math.inf
    measured = partial(replace, each=stream.each, peers=stream.peers, shared_memory=copied)
    own = {key: measured(link) for key, link in kinds.items()}
    if copied:
        return _copied(own, slow)
    carried = _carried(own, stream, found, slow, period) if own else {}
    return {key: _less_messages(link, found[key]) for key, link in carried.items()}


def _less_messages(link: Link, samples: Sequence[Sample]) -> Link:
    """A link whose bytes take what others did beside, less what messages take."""
    messages = len(samples) * link.work(0) / sum(sample.sent for sample in samples)
    return replace(link, beside=max(link.beside - messages, 0.0))


def _copied(own: Mapping[str, Link], slow: float) -> dict[str, Link]:
    """Links whose bytes are copied by the thread that computes, so that nothing is on its way.

    Where ranks share a processor, the others compute while one waits, and that is counted for them.
    """
    if slow == 1.0:
        return dict(own)
    return {key: replace(link, bytes_per_s=math.inf, latency=0.0) for key, link in own.items()}


def _carried(
    own: Mapping[str, Link], stream: LinkStream, found: Mapping[str, Sequence[Sample]], slow: float, period: float
) -> dict[str, Link]:
    """Links that carry bytes while the thread computes."""
    every = [sample for key in own for sample in found[key]]
    shaped = all(_shaped(link, stream, slow) for link in own.values())
    ahead = _ahead(every, stream, shaped, max(_work(link) for link in own.values()) * slow)
    if ahead > 0:
        same = partial(replace, bytes_per_s=stream.rate, burst=ahead, latency=0.0, peak=math.inf)
        return {key: same(link, together=stream.together) for key, link in own.items()}
    if not shaped:
        return {key: _bounded(link, found[key], stream) for key, link in own.items()}
    late = _delayed(every, stream, period)
    return {key: _burst(link, [each for each in found[key] if each not in late], stream) for key, link in own.items()}


def _ahead(samples: Sequence[Sample], stream: LinkStream, shaped: bool, work: float) -> float:
    """The bytes by which transfers apart from each other are ahead of the steady rate; 0 if it is not they that differ.

    Where the link itself is what is slow, and not its threads, transfers can be faster for no other reason, unless a
    burst explains it.

    Args:
        samples: the transfers.
        stream: what the link does that is kept busy.
        shaped: whether its steady rate is less than theirs.
        work: seconds of threads for a byte.
    """
    ahead = fmean([sample.sent - stream.rate * sample.carried for sample in samples])
    explained = shaped and stream.burst >= ahead
    slow = 1 / stream.rate > WORKING * work
    return max(ahead, 0.0) if _even(samples, stream) or (slow and not explained) else 0.0


def _even(samples: Sequence[Sample], stream: LinkStream) -> bool:
    """Tell whether transfers apart from each other have the steady rate, and are ahead of it by the same bytes.

    That says the slope of their times by size: the median of those of all pairs (Theil and Sen), for some waits are
    longer by what else the machine does.
    """
    pairs = [(a, b) for a, b in combinations(samples, 2) if a.sent != b.sent]
    slopes = [(a.carried - b.carried) / (a.sent - b.sent) for a, b in pairs]
    return bool(slopes) and 1 / SLOWER < median(slopes) * stream.rate < SLOWER


def _bounded(link: Link, samples: Sequence[Sample], stream: LinkStream) -> Link:
    """A link that is not shaped: what it reaches when it is kept busy, and with one transfer, which may be far less."""
    sizes = [sample.sent for sample in samples]
    latency, carrying = line(sizes, [sample.carried for sample in samples], 1 / stream.rate)
    peak = _rate(carrying)
    return replace(link, bytes_per_s=max(stream.rate, peak), latency=latency, peak=peak, together=stream.together)


def _shaped(link: Link, stream: LinkStream, slow: float) -> bool:
    """Tell whether a link is slower, when it is kept busy, than all that a transfer takes apart from others."""
    return 1 / stream.rate > SLOWER * (_work(link) * slow + 1 / link.bytes_per_s)


def _work(link: Link) -> float:
    """Seconds of all threads for a byte."""
    return link.sending + link.beside + link.taking


def _delayed(samples: Sequence[Sample], stream: LinkStream, period: float) -> set[Sample]:
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


def _burst(link: Link, free: Sequence[Sample], stream: LinkStream) -> Link:
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
