"""Objects in attributes of modules, which all instances share: what they held when the module was split.

A module's configuration is one, a meter that counts calls another. What a call writes to such an object is there until
the call is over. Then the object is put back to what it was.
"""

import operator
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fshard.model.containers import copied, holds, inside, matches, outline, take

_OTHERS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)

MOST = 64
"""Objects that are looked at."""


class Shared:
    """The objects that the modules of a structure hold.

    Args:
        root: the module.
        whole: by identity, modules that are told apart from objects.
    """

    def __init__(self, root: nn.Module, whole: Mapping[int, nn.Module]) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_") or name not in vars(nn.Module()):
                    _find(f"{path}.{name}" if path else name, value, found)
        self._objects = [_Object(name, value) for name, value in found.values()]

    def clean(self) -> bool:
        """Whether all objects are what they were."""
        return all([one.clean() for one in self._objects])

    def changed(self) -> dict[str, Any]:
        """The attributes of objects that are not what they were, by name."""
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
        self.held = {key: (outline(x), copied(x, {})) for key, x in self.kept.items() if holds(x)}

    def clean(self) -> bool:
        now = self.entries
        return (
            len(now) == len(self.kept)
            and all(map(operator.is_, now.values(), self.values))
            and all([matches(now[key], was) for key, (was, _) in self.held.items()])
        )

    def changed(self) -> Iterator[tuple[str, Any]]:
        for key, now in self.entries.items():
            held = key in self.held and not matches(now, self.held[key][0])
            if key not in self.kept or now is not self.kept[key] or held:
                yield f"{self.name}.{key}", now

    def restore(self) -> None:
        before = {key: take(self.kept[key], copied(x, {})) for key, (_, x) in self.held.items()}
        self.entries.clear()
        self.entries.update(self.kept | before)


def _find(name: str, value: Any, found: dict[int, tuple[str, Any]], depth: int = 0) -> None:
    for x in inside(value):
        if isinstance(x, _OTHERS) or id(x) in found or len(found) == MOST or depth == 3:
            continue
        if type(getattr(x, "__dict__", None)) is dict and x.__dict__ is not None:
            found[id(x)] = name, x
            for key, below in list(vars(x).items()):
                _find(f"{name}.{key}", below, found, depth + 1)
