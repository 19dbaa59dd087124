"""Readings: a rank reads its device once for all numbers that it tells the others of a step."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.runtime.engine.loss_result import means_of
from fshard.runtime.engine.plain_values import PlainValues
from fshard.runtime.memory.gradients import DTYPE

RuleNorms = Sequence[tuple[float, Tensor]]
"""Norms of gradients, 0-dim, each after the part of its elements that this rank counts."""


class Reading(NamedTuple):
    """Numbers, some of them on a device, and what is made of them once they are read."""

    values: Sequence[Tensor | float]
    made: Callable[[Sequence[float]], Any]


def answers(readings: Sequence[Reading]) -> list[Any]:
    """The results of readings, by one read of each device: the only wait of a step for its device."""
    numbers, found, begin = [*read([*itertools.chain(*[each.values for each in readings])])], list[Any](), 0
    for each in readings:
        end = begin + len(each.values)
        found.append(each.made(numbers[begin:end]))
        begin = end
    return found


def pair(parts: Iterable[tuple[Tensor | float, Tensor | float]]) -> Reading:
    """The total and the count of some of them; a count of -inf if one is negative."""
    return Reading([*itertools.chain(*parts)], lambda numbers: (sum(numbers[::2]), _counted(numbers[1::2])))


def mean_pairs(aux: Sequence[Any]) -> list[Reading]:
    """The ``pair`` of each auxiliary mean, of the auxiliary values of each microbatch."""
    columns = zip(*map(means_of, aux), strict=True)
    return [pair([(mean.total, mean.count) for mean in column]) for column in columns]


def _counted(counts: Sequence[float]) -> float:
    return -math.inf if any([count < 0 for count in counts]) else sum(counts)


def squares(rules: Sequence[RuleNorms]) -> Reading:
    """This rank's part of the squared norm of each clipping rule's leaves."""

    def made(numbers: Sequence[float]) -> list[float]:
        norms = iter(numbers)
        return [
            exact_sum([share * norm * norm for (share, _), norm in zip(rule, norms, strict=False)]) for rule in rules
        ]

    return Reading([norm for rule in rules for _, norm in rule], made)


def plain(values: PlainValues) -> Reading:
    """Plain values, which become ``PlainTold``."""
    return Reading(values.unread, lambda numbers: values.told(iter(numbers)))


def exact_sum(values: Sequence[float]) -> float:
    """An exact sum. Where infinities or too large numbers have none, it is that of floating-point arithmetic."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def read(values: Sequence[Tensor | float]) -> Iterator[float]:
    """0-dim tensors and numbers as floats, by one read of each device.

    >>> [*read([torch.tensor(1.5), 2, torch.tensor(3)])]
    [1.5, 2.0, 3.0]
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(value)
    numbers = {device: iter(_stacked(tensors)) for device, tensors in by_device.items()}
    return iter([next(numbers[value.device]) if isinstance(value, Tensor) else float(value) for value in values])


def _stacked(tensors: Sequence[Tensor]) -> list[float]:
    """Single numbers on one device, by one read."""
    if any([not dtype.is_floating_point for dtype in set(map(DTYPE, tensors))]):
        tensors = [x if x.is_floating_point() else x.double() for x in tensors]  # the stack would round large integers
    if any(map(NDIM, tensors)):
        tensors = [x.reshape(()) for x in tensors]
    found: list[float] = torch.stack([*tensors]).detach().tolist()
    return found


NDIM = operator.attrgetter("ndim")
