"""Chooses the submodules that are units: by path, by class, or the repeated blocks (``"auto"``)."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from fshard.model import model_refusals
from fshard.patterns import glob_matches, glob_meant

Pattern = str | type[nn.Module]

AUTO = "auto"
"""``units="auto"`` takes the ``repeated`` blocks."""


def chosen(module: nn.Module, units: Pattern | Iterable[Pattern]) -> tuple[str, ...]:
    """The paths of the units, each module under its first path, in the order of registration."""
    if isinstance(units, str) and units == AUTO:
        return repeated(module)
    picked = {id(below) for below in _hits(module, _patterns(units))}
    found = {path: below for path, below in module.named_modules() if path and id(below) in picked}
    idle = {path: type(unit).__name__ for path, unit in found.items() if uncallable(unit)}
    if idle:
        raise model_refusals.uncallable_unit(idle)
    if nested := _nested(found):
        raise model_refusals.nested_units(nested)
    return tuple(found)


def _patterns(units: Pattern | Iterable[Pattern]) -> list[Pattern]:
    patterns = list(units) if isinstance(units, Iterable) and not isinstance(units, (str, type)) else [units]
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise model_refusals.bad_unit_pattern(pattern)
    return patterns


def _nested(units: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Pairs of units, the second inside of the first."""
    first = {id(unit): path for path, unit in units.items()}
    inner = ((path, below) for path, unit in units.items() for below in unit.modules() if below is not unit)
    return [(path, first[id(below)]) for path, below in inner if id(below) in first]


def repeated(module: nn.Module) -> tuple[str, ...]:
    """The blocks of a model: the children of its outermost ``nn.ModuleList`` and ``nn.Sequential``.

    Of a ``ModuleList``, all children with parameters are blocks. Of a ``Sequential``, which often is a small network,
    the children with submodules are blocks, if there are at least two. The search goes from the outside in, so no block
    lies inside of another: the experts of a block belong to the block.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
    >>> repeated(nn.ModuleDict({"embed": nn.Linear(2, 4), "layers": nn.ModuleList(blocks), "head": nn.Linear(4, 1)}))
    ('layers.0', 'layers.1', 'layers.2')

    Raises:
        PlanError: there are no blocks.
    """
    found = tuple(_blocks(module, "", set()))
    if not found:
        raise model_refusals.no_blocks([(path, type(below).__name__) for path, below in module.named_modules() if path])
    return found


def _blocks(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[str]:
    if id(module) in seen:
        return
    seen.add(id(module))
    taken = {id(child) for child in _held(module)}
    for name, child in module.named_children():
        if id(child) in taken:
            if id(child) not in seen:
                yield prefix + name
            seen.update(id(below) for below in child.modules())
        else:
            yield from _blocks(child, f"{prefix}{name}.", seen)


def _held(module: nn.Module) -> list[nn.Module]:
    """The children of a container that are blocks."""
    whole = [child for child in module.children() if any(True for _ in child.parameters()) and not uncallable(child)]
    if isinstance(module, nn.ModuleList):
        return whole
    composed = [child for child in whole if any(True for _ in child.children())]
    return composed if isinstance(module, nn.Sequential) and len({*map(id, composed)}) > 1 else []


def uncallable(module: nn.Module) -> bool:
    """Tell whether a module has no forward, like a list of modules."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    return glob_matches(pattern, path) if isinstance(pattern, str) else isinstance(module, pattern)


def _hits(module: nn.Module, patterns: list[Pattern]) -> Iterator[nn.Module]:
    """The submodules that patterns match."""
    every = [(path, below) for path, below in module.named_modules(remove_duplicate=False) if path]
    hits = [[below for path, below in every if _matches(pattern, path, below)] for pattern in patterns]
    unmatched = [pattern for pattern, found in zip(patterns, hits, strict=True) if not found]
    if unmatched:
        hint = glob_meant(unmatched[0], [path for path, _ in every]) if isinstance(unmatched[0], str) else ""
        raise model_refusals.no_such_unit(unmatched, [(path, type(below).__name__) for path, below in every], hint)
    return itertools.chain.from_iterable(hits)
