"""Rows of options in which every two options meet: a full product's pairs at a fraction of its rows."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, int]]
"""Two options, each by its name and the index of its value."""

TRIES = 40
"""Candidates for each row; the one with the most new pairs is taken."""


def rows(options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Rows that are allowed, and that together have every pair of values that any allowed row can have.

    The rows are the same in every process. Pairs of the first two options come first, so there are about as many rows
    as these have pairs.

    Args:
        options: the values of each option; put those with the most values first.
        allowed: whether a row, or the part of one that is chosen so far, makes sense.
        seed: of the candidates.
    """
    random = Random(seed)
    missing = dict.fromkeys(pairs(options))
    out: list[Row] = []
    while missing:
        pair = next(iter(missing))
        candidates = [found for _ in range(TRIES) if (found := _filled(options, pair, missing, allowed, random))]
        if not candidates:
            del missing[pair]  # no allowed row has it
            continue
        best = max(candidates, key=lambda found: sum(p in missing for p in _within(found)))
        for found in _within(best):
            missing.pop(found, None)
        out.append(_values(options, best))
    return out


def pairs(options: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """Every two values of different options."""
    for (a, some), (b, others) in itertools.combinations(options.items(), 2):
        for i, j in itertools.product(range(len(some)), range(len(others))):
            yield frozenset(((a, i), (b, j)))


def _within(row: Mapping[str, int]) -> list[Pair]:
    return [frozenset(pair) for pair in itertools.combinations(row.items(), 2)]


def _filled(
    options: Mapping[str, Sequence[Any]],
    pair: Pair,
    missing: Mapping[Pair, None],
    allowed: Callable[[Row], bool],
    random: Random,
) -> dict[str, int] | None:
    """An allowed row with this pair; each other option in turn gets the value that adds the most pairs."""
    chosen = dict(pair)
    for name in random.sample(sorted(options.keys() - chosen.keys()), len(options) - len(chosen)):
        fresh = {
            at: sum(frozenset(((name, at), other)) in missing for other in chosen.items())
            for at in range(len(options[name]))
            if allowed(_values(options, chosen | {name: at}))
        }
        if not fresh:
            return None
        chosen[name] = random.choice([at for at, count in fresh.items() if count == max(fresh.values())])
    return {name: chosen[name] for name in options}


def _values(options: Mapping[str, Sequence[Any]], chosen: Mapping[str, int]) -> Row:
    return {name: options[name][at] for name, at in chosen.items()}
