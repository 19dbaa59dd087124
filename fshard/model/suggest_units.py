"""Proposals for who has no units yet: the repeated modules of a model."""

import math
import re
from collections.abc import Mapping

from torch import nn

from fshard.arguments import described
from fshard.errors import PlanError

Shape = tuple[int, ...]


def suggest_units(module: nn.Module) -> tuple[str, ...]:
    """Patterns of the modules of a model that repeat, such as transformer blocks: good units for ``fs.split``.

    A unit is gathered and freed as a whole, and gathered while the one before it computes. Blocks that repeat hold most
    of the parameters of most models, and are computed one after the other.

    Args:
        module: the module; it may be on the meta device, or made under ``fs.empty_weights``.

    Returns:
        Globs for ``fs.split(module, units=...)``, outermost first. Where nothing repeats, the direct children that have
        parameters, if there are several.

    Raises:
        PlanError: it is not a module.

    >>> blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    >>> ends = {"embed": torch.nn.Embedding(10, 8), "head": torch.nn.Linear(8, 10)}
    >>> fs.suggest_units(torch.nn.ModuleDict({**ends, "blocks": blocks}))
    ('blocks.*',)
    """
    if not isinstance(module, nn.Module):
        raise PlanError(f"fs.suggest_units(module) takes an nn.Module, and was given {described(module)}")
    shapes = {name: tuple(leaf.shape) for name, leaf in module.named_parameters()}
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    return repeated(shapes) or (tuple(children) if len(children) > 1 else ())


def repeated(shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Patterns of subtrees that repeat under one parent, numbered from 0, outermost first.

    At least two of them have leaves of the same names and shapes.

    Args:
        shapes: of all leaves, by path.

    >>> repeated({"h.0.w": (2,), "h.1.w": (2,), "h.1.b": (1,), "h.2.w": (2,), "head": (3,)})
    ('h.*',)
    """
    inside: dict[str, dict[str, dict[str, Shape]]] = {}
    for path, shape in shapes.items():
        for found in re.finditer(r"(?:^|\.)(\d+)\.", path):
            parent = path[: found.start()]
            inside.setdefault(parent, {}).setdefault(found[1], {})[path[found.end() :]] = shape
    out: list[str] = []
    for parent, children in inside.items():
        forms = [tuple(sorted(leaves.items())) for leaves in children.values()]
        pattern = f"{parent}.*" if parent else "*"
        if len(set(forms)) < len(forms) and not any(f"{parent}.".startswith(f"{known[:-1]}") for known in out):
            out.append(pattern)
    return tuple(out)


def largest(shapes: Mapping[str, Shape], patterns: tuple[str, ...]) -> int:
    """The elements of the largest subtree that a pattern matches."""
    sizes: dict[str, int] = {}
    for path, shape in shapes.items():
        for pattern in patterns:
            prefix = pattern[:-1]
            if path.startswith(prefix):
                unit = prefix + path[len(prefix) :].split(".")[0]
                sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
    return max(sizes.values(), default=0)
