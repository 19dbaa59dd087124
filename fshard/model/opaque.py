"""Objects that are no trees: what tensors they hold, and whether a call changed that."""

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree

_CLOSED = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, nn.Module)
_CODE = (FunctionType, MethodType, ModuleType)


def opaque(values: Any) -> list[Any]:
    """The leaves of a tree that are neither tensors nor plain values, and so may hold tensors that nobody sees."""
    return [leaf for leaf in tree.leaves(values) if not isinstance(leaf, (Tensor, *_CLOSED, *_CODE))]


def held(value: Any) -> tuple[tuple[int, int], ...]:
    """The tensors that an object holds, at any depth: their identities and versions, which a write changes.

    >>> class Cache:
    ...     def __init__(self):
    ...         self.layers = []
    >>> cache = Cache()
    >>> before = held(cache)
    >>> cache.layers.append({"keys": torch.zeros(2)})
    >>> held(cache) == before
    False
    """
    return tuple((id(x), 0 if x.is_inference() else x._version) for x in tensors_in(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that an object holds, at any depth."""
    return _tensors(value, set())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (*_CLOSED, *_CODE)) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            below = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            below = list(value)
        else:
            below = list(getattr(value, "__dict__", {}).values())
        for part in below:
            yield from _tensors(part, seen)
