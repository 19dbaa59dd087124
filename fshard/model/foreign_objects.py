"""Objects in attributes and arguments that are neither containers nor modules: the tensors in them, and what changed.

A module's configuration is such an object, and so is a meter that counts calls. All instances of a module share them.
A call's writes to such an object last until the call is over; then the object is put back to what it was.
"""

import operator
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.model.containers import copied, holds, inside, matches, outline, take

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, nn.Module)
_CODE = (FunctionType, MethodType, ModuleType)
_NO_OBJECTS = (nn.Module, Tensor, type, *_CODE)

MOST = 64
"""The most objects that are compared after a call."""


def opaque(values: Any) -> list[Any]:
    """The leaves of a tree that are neither tensors nor plain values: objects, which may hold tensors."""
    return [leaf for leaf in tree.leaves(values) if not isinstance(leaf, (Tensor, *_PLAIN, *_CODE))]


def held(value: Any) -> tuple[tuple[int, int], ...]:
    """The identities and versions of the tensors that an object holds, at any depth. A write changes them.

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


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors that an object holds, at any depth, but for those in objects that were seen."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (*_PLAIN, *_CODE)) and id(value) not in seen:
        seen.add(id(value))
        if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            value = getattr(value, "__dict__", {})
        for part in list(value.values() if isinstance(value, Mapping) else value):
            yield from tensors_in(part, seen)


class Shared:
    """The objects in attributes of a module and its submodules."""

    def __init__(self, root: nn.Module) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_") or name not in vars(nn.Module()):
                    _find(f"{path}.{name}" if path else name, value, found)
        self._objects = [_Object(name, value) for name, value in found.values()]

    def clean(self) -> bool:
        """Tell whether no object has changed."""
        return all([one.clean() for one in self._objects])

    def changed(self) -> dict[str, Any]:
        """The attributes of objects that have changed, by name."""
        return {spot: value for one in self._objects for spot, value in one.changed()}

    def restore(self) -> None:
        """Put all objects back."""
        for one in self._objects:
            if not one.clean():
                one.restore()


class _Object:
    def __init__(self, name: str, value: Any) -> None:
        self.name, self.entries = name, vars(value)
        self.kept = dict(self.entries)
        self.values = list(self.kept.values())
        self.containers = {key: (outline(x), copied(x, {})) for key, x in self.kept.items() if holds(x)}

    def clean(self) -> bool:
        now = self.entries
        same = len(now) == len(self.kept) and all(map(operator.is_, now.values(), self.values))
        return same and all([matches(now[key], was) for key, (was, _) in self.containers.items()])

    def changed(self) -> Iterator[tuple[str, Any]]:
        for key, now in self.entries.items():
            written = key in self.containers and not matches(now, self.containers[key][0])
            if key not in self.kept or now is not self.kept[key] or written:
                yield f"{self.name}.{key}", now

    def restore(self) -> None:
        before = {key: take(self.kept[key], copied(x, {})) for key, (_, x) in self.containers.items()}
        self.entries.clear()
        self.entries.update(self.kept | before)


def _find(name: str, value: Any, found: dict[int, tuple[str, Any]], depth: int = 0) -> None:
    for x in inside(value):
        if isinstance(x, _NO_OBJECTS) or id(x) in found or len(found) == MOST or depth == 3:
            continue
        if type(getattr(x, "__dict__", None)) is dict and x.__dict__ is not None:
            found[id(x)] = name, x
            for key, below in list(vars(x).items()):
                _find(f"{name}.{key}", below, found, depth + 1)
