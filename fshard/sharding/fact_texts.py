"""Facts: values as texts by name, which ranks compare where all must have equal values.

Equal values have equal facts, whatever objects hold them: no text depends on an address, on the order of a set, or on
the seed of ``hash``.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fshard.model.precision import Precision
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P
from fshard.sharding.wire import Wire

Texts = dict[str, str]
"""Texts by the name of their value."""

SAMPLES = (0, 1, 10, 100, 1000, 10_000, 100_000)
"""Functions of the step are compared by their values at these steps."""

DEPTH = 8
"""The depth of nested values that is compared."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format)


def walk(name: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """The values inside of a value, each with its name: ``optimizer.rules[0][1].lr``.

    Dataclasses contribute their compared fields, other objects their public attributes.

    >>> dict(walk("x", {"a": [1, 2], "b": 0.5}))
    {"x['a']": [1, 2], "x['b']": 0.5}
    """
    parts = None if depth == 0 else _parts(name, value)
    if parts is None:
        yield name, value
        return
    if not isinstance(value, (Mapping, list, tuple, functools.partial)):
        yield name, type(value)
    for part, inner in parts:
        yield from walk(part, inner, depth - 1)


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]] | None:
    """The values directly inside of a value; None for a leaf."""
    if isinstance(value, (*PLAIN, type, Tensor, set, frozenset)):
        return None
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(inner, PLAIN) for inner in value)
        return None if plain else [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    names = _attributes(value)
    return None if names is None else [(f"{name}.{key}", getattr(value, key)) for key in names]


def _attributes(value: Any) -> list[str] | None:
    """The attributes that stand for an object; None for one that its call or its repr stands for."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    if callable(value) or ADDRESS.search(repr(value)) is None:
        return None
    return [key for key in getattr(value, "__dict__", {}) if not key.startswith("_")]


def text(value: Any) -> str:
    """A leaf value of ``walk`` as text.

    >>> text([1, 2]), text(torch.float32), text({2, 1}), text(lambda step: 0.5)[:17]
    ('(1, 2)', 'torch.float32', '{1, 2}', '0.5 at steps 0, 1')
    """
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.tolist() if value.numel() <= 16 else ''}"
    if isinstance(value, list):
        return repr(tuple(value))
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    if callable(value):
        return _function(value)
    return ADDRESS.sub("", repr(value))


def _function(value: Callable[..., Any]) -> str:
    """A function of the step by its values, another function by its name."""
    found = [(step, sampled(value, step)) for step in SAMPLES] if sampled(value, 0) is not None else []
    runs: list[tuple[float | None, list[int]]] = []
    for step, rate in found:
        if not runs or runs[-1][0] != rate:
            runs.append((rate, []))
        runs[-1][1].append(step)
    if runs:
        return ", ".join(f"{rate!r} at step{'s' * (len(at) > 1)} {', '.join(map(str, at))}" for rate, at in runs)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def sampled(value: Any, step: int) -> float | None:
    """The number that a function of the step returns for one; None if it returns none."""
    try:
        rate = value(step)
    except Exception:  # a function of other arguments, or one that ends before this step
        return None
    return float(rate) if isinstance(rate, Real) else None


def texts(name: str, value: Any) -> Texts:
    """All values inside of a value, as texts by name.

    >>> texts("clip_norm", ((".*", 1.0),))
    {'clip_norm[0]': "('.*', 1.0)"}
    """
    return {part: text(inner) for part, inner in walk(name, value)}


def plan_texts(
    mesh: Mesh, batch: P, precision: Precision, groups: Sequence[Group], evaluated: Sequence[str] = ()
) -> tuple[Texts, Texts]:
    """A plan as texts: of the whole, and of each leaf and each group; without this rank's position."""
    head = {"mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()), "device": mesh.device.type}
    head |= {"batch": repr(batch), **texts("precision", precision)}
    head |= {"modules in evaluation mode": ", ".join(evaluated)} if evaluated else {}
    leaves = {f"leaf {leaf.path}": _leaf_text(leaf, group.unit) for group in groups for leaf in group.leaves}
    paths = {f"group {group.name}": ", ".join(leaf.path for leaf in group.leaves) for group in groups}
    return head, leaves | paths


def _leaf_text(leaf: Leaf, unit: str) -> str:
    """A leaf with its settings that are not the defaults."""
    said = {
        "opt": leaf.opt,
        "align": leaf.align,
        "kinds": str(leaf.kinds) or None,
        "wire": None if leaf.wire == Wire() else leaf.wire,
        "packed": leaf.packed,
        "precision": None if leaf.precision == Precision() else leaf.precision,
        "products": leaf.products,
        "aliases": leaf.aliases or None,
    }
    more = "".join(f", {name}={value}" for name, value in said.items() if value is not None)
    train = "trained" if leaf.trainable else "frozen"
    specs = f"{leaf.at_rest} at rest, {leaf.compute} in compute"
    return f"{list(leaf.shape)} {leaf.dtype} of unit {unit}, {train}, {specs}{more}"
