"""Modules outside of a unit that its attributes hold: its code may call them where they have no parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fshard.model.containers import matches, outline
from fshard.model.writes import BASE


class Elsewhere:
    """The content of modules outside of a unit, to find writes of the unit's code to them.

    Args:
        modules: by path, the modules, which all calls share.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._kept = {path: {name: outline(x) for name, x in _held(module)} for path, module in modules.items()}

    def written(self) -> str | None:
        """The path of an attribute, a child or a parameter that has changed; None if none has."""
        for path, module in self._modules.items():
            kept, now = self._kept[path], dict(_held(module))
            for name in {**kept, **now}:
                if name not in kept or name not in now or not matches(now[name], kept[name]):
                    return f"{path}.{name}" if path else name
        return None


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, x) for name, x in vars(module).items() if name not in BASE)
    for table in (module._modules, module._parameters, module._buffers):
        yield from table.items()
    yield from ((f"{name}.requires_grad", x.requires_grad) for name, x in module._parameters.items() if x is not None)
