"""Packing: static offsets for items that live several times, so that items alive together never overlap.

This is dynamic storage allocation with all lifetimes known, which is NP-hard. Two things make it easy here.
Items that stay for long nest (what is gathered first is freed last), so they form a stack, and the rest
starts above it. And the rest overlaps few others, so first fit against those is fast, and close to the bound
in one of a few orders.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Span = tuple[int, int]
"""First and last op, both included, of one lifetime."""

CROWD = 50
"""Lifetimes that begin within that of an item which is worth stacking."""

EFFORT = 300_000
"""Pairs of overlapping items that all attempts together look at. It bounds the time of packing as a clock
would, but is the same on every rank."""

ATTEMPTS = 64


def pack(sizes: Sequence[int], spans: Sequence[Sequence[Span]], bound: int) -> list[int]:
    """An offset for each item such that items alive at the same time have disjoint ranges.

    First fit in several orders; between them, the item that ended highest moves to the front. The best result is kept.
    ``bound`` is the most bytes alive at once: nothing smaller is possible, so reaching it ends the search.

    >>> pack([4, 2, 2], [[(0, 1)], [(1, 2)], [(2, 3)]], bound=6)
    [0, 4, 0]
    """
    stacked = stack(sizes, spans)
    items = [i for i, size in enumerate(sizes) if size and spans[i] and i not in stacked]
    placed = _search(items, sizes, spans, bound, _floors(stacked, sizes, spans)) if items else [0] * len(sizes)
    return [stacked.get(i, placed[i]) for i in range(len(sizes))]


def _search(
    items: Sequence[int], sizes: Sequence[int], spans: Sequence[Sequence[Span]], bound: int, floors: Sequence[int]
) -> list[int]:
    """The lowest offsets that some attempts find for these items."""
    met = overlaps(spans, items)
    effort = sum(map(len, met)) + len(sizes)
    orders = [
        sorted(items, key=lambda i: (-sizes[i], spans[i][0])),
        sorted(items, key=lambda i: (spans[i][0], -sizes[i])),
    ]
    best: list[int] = []
    best_order, least = orders[0], 0
    for attempt in range(max(min(ATTEMPTS, EFFORT // effort), 1)):
        if attempt < len(orders):
            order = orders[attempt]
        else:
            highest = max(best_order, key=lambda i: best[i] + sizes[i])
            order = [highest, *(i for i in best_order if i != highest)]
        if attempt >= len(orders) and order == best_order:
            break
        offsets = first_fit(order, sizes, met, floors)
        top = max(offsets[i] + sizes[i] for i in items)
        if not best or top < least or (attempt >= len(orders) and top == least):
            best, best_order, least = offsets, order, top
        if least <= bound:
            break
    return best


def profile(count: int, items: Iterable[tuple[int, Sequence[Span]]]) -> list[int]:
    """Return what items of these sizes and lifetimes take together at each of ``count`` ops."""
    steps = [0] * (count + 1)
    for size, lives in items:
        for first, last in lives:
            steps[first] += size
            steps[last + 1] -= size
    return list(accumulate(steps[:count]))


def stack(sizes: Sequence[int], spans: Sequence[Sequence[Span]]) -> dict[int, int]:
    """Offsets of items whose one long lifetime nests in, or is apart from, the others': a stack."""
    starts = sorted(first for lives in spans for first, _ in lives)
    alone = [
        (lives[0][0], -lives[0][1], item)
        for item, lives in enumerate(spans)
        if len(lives) == 1 and bisect_right(starts, lives[0][1]) - bisect_left(starts, lives[0][0]) > CROWD
    ]
    offsets: dict[int, int] = {}
    below: list[tuple[int, int]] = []  # (last, top) of the items that the next may lie on
    for first, minus_last, item in sorted(alone):
        while below and below[-1][0] < first:
            below.pop()
        last, base = below[-1] if below else (-minus_last, 0)
        if -minus_last <= last:  # otherwise it outlives what it would lie on: it is placed like the rest
            offsets[item] = base
            below.append((-minus_last, base + sizes[item]))
    return offsets


def overlaps(spans: Sequence[Sequence[Span]], items: Sequence[int]) -> list[list[int]]:
    """For each of these items, the others that are alive at the same time at least once."""
    starts = sorted((first, last, item) for item in items for first, last in spans[item])
    met: list[list[int]] = [[] for _ in spans]
    alive: list[tuple[int, int]] = []  # (last, item)
    for first, last, item in starts:
        alive = [entry for entry in alive if entry[0] >= first]
        others = [other for _, other in alive]
        met[item] += others
        for other in others:
            met[other].append(item)
        alive.append((last, item))
    return [list(dict.fromkeys(others)) for others in met]


def first_fit(
    order: Sequence[int], sizes: Sequence[int], met: Sequence[Sequence[int]], floors: Sequence[int]
) -> list[int]:
    """Place items in this order, each at the lowest offset above its floor that is free of those it meets."""
    offsets = [-1] * len(sizes)
    for item in order:
        size, place = sizes[item], floors[item]
        for low, other in sorted([(offsets[other], other) for other in met[item] if offsets[other] >= 0]):
            if low - place >= size:
                break
            place = max(place, low + sizes[other])
        offsets[item] = place
    return [max(offset, 0) for offset in offsets]


def _floors(stacked: dict[int, int], sizes: Sequence[int], spans: Sequence[Sequence[Span]]) -> list[int]:
    """For each item, the height of the stack while it lives."""
    if not stacked:
        return [0] * len(sizes)
    count = max(last for lives in spans for _, last in lives) + 1
    heights = profile(count, [(sizes[item], spans[item]) for item in stacked])
    return [max((max(heights[first : last + 1]) for first, last in lives), default=0) for lives in spans]
