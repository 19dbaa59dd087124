"""Numbers that a rank tells the others of a step, some of which lie on a device: one read of it for all of them."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from fshard.runtime.steps.consensus import RuleNorms, read


class Reading(NamedTuple):
    """Numbers, some of them on a device, and what is made of them once they are read."""

    values: Sequence[Tensor | float]
    made: Callable[[Sequence[float]], Sequence[float]]


def answers(readings: Sequence[Reading]) -> list[float]:
    """Return what is made of some numbers, one after the other, by one read of each device."""
    numbers = read([value for each in readings for value in each.values])
    return [found for each in readings for found in each.made([*itertools.islice(numbers, len(each.values))])]


def pair(parts: Iterable[tuple[Tensor | float, Tensor | float]]) -> Reading:
    """The total and the count of some of them."""
    return Reading([*itertools.chain(*parts)], lambda numbers: (sum(numbers[::2]), sum(numbers[1::2])))


def squares(rules: Sequence[RuleNorms]) -> Reading:
    """This rank's part of the squared norm of each clipping rule's leaves."""

    def made(numbers: Sequence[float]) -> list[float]:
        norms = iter(numbers)
        shares = [[share for share, _ in rule] for rule in rules]
        return [math.fsum([share * norm * norm for share, norm in zip(rule, norms, strict=False)]) for rule in shares]

    return Reading([norm for rule in rules for _, norm in rule], made)
