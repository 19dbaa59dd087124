"""Which submodules are units: by path, by class, or the repeated blocks, found by themselves."""

import fnmatch
from collections.abc import Iterable, Iterator

from torch import nn

from fshard import errors
from fshard.patterns import glob_meant

Pattern = str | type[nn.Module]

AUTO = "auto"
"""What ``units=`` says for ``repeated``."""


def chosen(module: nn.Module, units: Pattern | Iterable[Pattern]) -> tuple[str, ...]:
    """The paths of the units, each module under its first path, in the order of registration.

    Raises:
        PlanError: a pattern is none or matches nothing, a unit cannot be called, or lies inside of another one.
    """
    if isinstance(units, str) and units == AUTO:
        return repeated(module)
    if not isinstance(units, (str, type)) and not isinstance(units, Iterable):
        raise errors.bad_unit_pattern(units)
    return _matched(module, [units] if isinstance(units, (str, type)) else list(units))


def repeated(module: nn.Module) -> tuple[str, ...]:
    """The blocks of a model: what its outermost ``nn.ModuleList`` and ``nn.Sequential`` hold.

    Of a ``ModuleList`` these are all children with parameters. Of a ``Sequential``, which often is no more than a small
    network, they are those that have submodules of their own, if there are two of them or more. Looked for from the
    outside in, so that no block lies inside of another: the experts of a block belong to the block.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
    >>> repeated(nn.ModuleDict({"embed": nn.Linear(2, 4), "layers": nn.ModuleList(blocks), "head": nn.Linear(4, 1)}))
    ('layers.0', 'layers.1', 'layers.2')

    Raises:
        PlanError: there are none.
    """
    seen: set[int] = set()
    found = tuple(_blocks(module, "", seen))
    if not found:
        raise errors.no_blocks([(path, type(below).__name__) for path, below in module.named_modules() if path])
    return found


def _blocks(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[str]:
    if id(module) in seen:
        return
    seen.add(id(module))
    whole = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.ModuleList):
        taken = {id(child) for child in whole if not uncallable(child)}
    elif isinstance(module, nn.Sequential):
        composed = {id(child) for child in whole if any(True for _ in child.children()) and not uncallable(child)}
        taken = composed if len(composed) > 1 else set()
    else:
        taken = set()
    for name, child in module.named_children():
        if id(child) in taken:
            if id(child) not in seen:
                yield prefix + name
            seen.update(id(below) for below in child.modules())
        else:
            yield from _blocks(child, f"{prefix}{name}.", seen)


def uncallable(module: nn.Module) -> bool:
    """Whether a module has no forward, like a list of modules."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        globs, parts = pattern.split("."), path.split(".")
        return len(globs) == len(parts) and all(map(fnmatch.fnmatchcase, parts, globs))
    return isinstance(module, pattern)


def _matched(module: nn.Module, patterns: list[Pattern]) -> tuple[str, ...]:
    every = [(path, below) for path, below in module.named_modules(remove_duplicate=False) if path]
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise errors.bad_unit_pattern(pattern)
    hits = [[below for path, below in every if _matches(pattern, path, below)] for pattern in patterns]
    unmatched = [pattern for pattern, found in zip(patterns, hits, strict=True) if not found]
    if unmatched:
        hint = glob_meant(unmatched[0], [path for path, _ in every]) if isinstance(unmatched[0], str) else ""
        raise errors.no_such_unit(unmatched, [(path, type(below).__name__) for path, below in every], hint)
    picked = {id(below) for found in hits for below in found}
    units = {path: below for path, below in module.named_modules() if path and id(below) in picked}
    idle = {path: type(unit).__name__ for path, unit in units.items() if uncallable(unit)}
    if idle:
        raise errors.uncallable_unit(idle)
    first = {id(unit): path for path, unit in units.items()}
    nested = [
        (path, first[id(below)])
        for path, unit in units.items()
        for below in unit.modules()
        if below is not unit and id(below) in first
    ]
    if nested:
        raise errors.nested_units(nested)
    return tuple(units)
