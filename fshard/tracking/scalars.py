"""The numbers in any tree of metrics, as plain Python numbers by name."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from fshard.runtime.steps.readings import read


def scalars(values: Any) -> dict[str, float]:
    """The numbers in a pytree, as plain Python numbers by name; leaves that are no numbers are left out.

    Args:
        values: any tree of dicts, lists and dataclasses with 0-dim tensors, numpy scalars and numbers; what has a
            method ``scalars`` says itself what it holds. Tensors of one element count, others do not. Those on an
            accelerator are read at once.

    >>> import torch
    >>> scalars({"loss": torch.tensor(0.5), "gan": {"real": 1, "name": "x"}, "rows": torch.ones(3)})
    {'loss': 0.5, 'gan/real': 1}
    """
    found = dict(_numbers("", values))
    away = [name for name, value in found.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
    found |= zip(away, read([found[name] for name in away]), strict=True)
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers under a value, with names joined by slashes."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            yield name or "value", value.detach()
    elif isinstance(value, bool | int | float):
        yield name or "value", value
    elif hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
        yield name or "value", value.item()
    else:
        for key, inner in _children(value):
            yield from _numbers(f"{name}/{key}" if name else str(key), inner)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The values right inside of a value, with their keys."""
    if hasattr(value, "scalars"):
        yield from value.scalars().items()
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value):
        yield from ((one.name, getattr(value, one.name)) for one in fields(value))
