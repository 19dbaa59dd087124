"""Plain values that a function returns: numbers, strings and 0-dim tensors. One rule for all kinds of steps.

A float is its mean over ranks and microbatches, exactly itself where all are equal. All other plain values must be
equal on all ranks. Tensors with dims, buffers that ``model.apply`` has returned, shards and other objects are each
rank's own.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.model.changed_buffers import is_own
from fshard.runtime.comm.facts import digest

UNUSED = 10
"""Bits of a hash that a float64, as which it travels, has no place for."""

FLOAT = "a float"
"""The text of a float, whose value may differ."""

Told = Mapping[str, str]
"""Plain values as texts, by name."""


def is_float(value: Any) -> bool:
    """Tell whether a value is a Python float, or a 0-dim floating tensor, of which ranks take the mean."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype.is_floating_point and not is_own(value)
    return isinstance(value, Real) and not isinstance(value, Integral)


def is_equal_one(value: Any) -> bool:
    """Tell whether a value is a plain one that must be equal on all ranks."""
    if isinstance(value, Tensor):
        whole = not value.dtype.is_floating_point and not value.dtype.is_complex
        return value.ndim == 0 and whole and not is_own(value)
    return value is None or isinstance(value, Integral | str | bytes)


class PlainTold(NamedTuple):
    """The plain values of a rank, read.

    Attributes:
        floats: the mean over its microbatches of each float.
        texts: the names of floats, and all other plain values as texts by name.
    """

    floats: tuple[float, ...] = ()
    texts: Told = MappingProxyType({})

    @property
    def number(self) -> int:
        """Equal on two ranks if all but the values of floats is; 0 without plain values."""
        return digest(sorted(self.texts.items())) >> UNUSED if self.texts else 0


@dataclass(frozen=True)
class PlainValues:
    """The plain values of a rank.

    Attributes:
        floats: by name, a float of each microbatch.
        equal: by name, a value of each microbatch that must be equal on all ranks.
    """

    floats: Mapping[str, Sequence[Tensor | float]]
    equal: Mapping[str, Sequence[Any]]

    @property
    def unread(self) -> list[Tensor | float]:
        """The numbers that ``told`` takes, some of them on a device."""
        tensors = [x for values in self.equal.values() for x in values if isinstance(x, Tensor)]
        return [*itertools.chain(*self.floats.values()), *tensors]

    def told(self, numbers: Iterator[float]) -> PlainTold:
        """The values, with those of ``unread`` as numbers."""
        floats = tuple([mean_of([next(numbers) for _ in values]) for values in self.floats.values()])
        texts = dict.fromkeys(self.floats, FLOAT)
        for name, values in self.equal.items():
            said = [_said(x, next(numbers)) if isinstance(x, Tensor) else repr(x) for x in values]
            texts[name] = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
        return PlainTold(floats, texts)


def plain_values(parts: Sequence[Any], name: str = "") -> PlainValues:
    """The plain values of the results of all microbatches.

    Args:
        parts: the result of each, alike in structure.
        name: of a result that is itself a plain value.
    """
    found = PlainValues({}, {})
    if not parts or not any([is_float(leaf) or is_equal_one(leaf) for leaf in tree.leaves(parts[0])]):
        return found
    floats, equal = dict[str, Sequence[Any]](), dict[str, Sequence[Any]]()
    columns = zip(*map(tree.leaves, parts), strict=True)
    for path, column in zip(tree.names(parts[0], name), columns, strict=True):
        if all(map(is_float, column)):
            floats[path] = column
        elif all([is_float(x) or is_equal_one(x) for x in column]):
            equal[path] = column
    return PlainValues(floats, equal)


def mean_of(values: Sequence[float]) -> float:
    """The mean: exactly the value, if all are equal."""
    if alike(values):
        return values[0]
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):  # infinities of both signs, or too large a sum
        return sum(values) / len(values)


def alike(values: Sequence[float]) -> bool:
    """Tell whether all are equal, or all are nan."""
    first = values[0]
    return all([x == first for x in values]) or all(map(math.isnan, values))


def _said(tensor: Tensor, number: float) -> str:
    """The text of a 0-dim tensor whose number a read has given."""
    if tensor.dtype.is_floating_point:
        return repr(number)
    return repr(bool(number) if tensor.dtype == torch.bool else int(number))
