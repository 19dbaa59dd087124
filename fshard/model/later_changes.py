"""Attributes of the user's module that are changed after the split, which a model does not see."""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, type(None))
"""Classes of values that are compared."""

OF_TORCH = ("p", "momentum")
"""Attributes of torch's own modules that users change while they train."""


class LaterChanges:
    """Tells once of plain attributes that differ between a module now and at its split.

    Args:
        module: the user's module, which is not kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (path, weakref.ref(holder), {name: vars(holder)[name] for name in names})
            for path, holder in _holders(module)
            if (names := _names(holder))
        ]

    def look(self) -> None:
        """Warn if an attribute was changed. Costs some microseconds for each block of a model."""
        if not self._held or all([one() is None or _equal(vars(one()), before) for _, one, before in self._held]):
            return
        found = [
            f"{path}.{name} was {was!r} and is {vars(one()).get(name, 'deleted')!r}".lstrip(".")
            for path, one, before in self._held
            if one() is not None
            for name, was in before.items()
            if vars(one()).get(name, self) != was
        ]
        self._held = []
        warnings.warn(
            f"attributes of the module were changed after fs.split, and the model has those at the split: "
            f"{'; '.join(found[:5])}{'; ...' if len(found) > 5 else ''}. Give what changes from step to step with the "
            f"batch, as arguments of the forward, or split again and make a new step",
            stacklevel=3,
        )


def _holders(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules, and objects in their attributes such as configurations, each once."""
    seen = set[int]()
    for path, below in module.named_modules():
        for name, value in [("", below), *vars(below).items()]:
            objects = isinstance(value, nn.Module | Tensor | type) or type(getattr(value, "__dict__", None)) is not dict
            if (name and (objects or name.startswith("_") or callable(value))) or id(value) in seen:
                continue
            seen.add(id(value))
            if type(value).__weakrefoffset__:
                yield ".".join(filter(None, (path, name))), value


def _names(holder: Any) -> list[str]:
    """The attributes to compare."""
    ours = isinstance(holder, nn.Module) and type(holder).__module__.startswith("torch.nn.")
    return [
        name
        for name, value in vars(holder).items()
        if isinstance(value, PLAIN)
        and not name.startswith("_")
        and name != "training"
        and (name in OF_TORCH or not ours)
    ]


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    for name, was in before.items():
        if now.get(name, before) is not was and now.get(name, before) != was:
            return False
    return True
