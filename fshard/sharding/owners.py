"""The unit that owns each leaf."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fshard.errors import PlanError, lines
from fshard.patterns import glob_matches, glob_meant

ROOT = "root"
"""The unit of all leaves outside of units: the code between units."""


@runtime_checkable
class Modelled(Protocol):
    """A split model: parameters and units."""

    params: Any
    units: Any


def owners_of(leaves: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, str]:
    """The owner of each leaf of a plain tree: the prefix of its path that a pattern matches."""
    used: set[str] = set()
    owners = dict.fromkeys(leaves, ROOT)
    for path in leaves:
        above = _prefixes(path)
        for pattern, prefix in ((p, prefix) for p in patterns for prefix in above if glob_matches(p, prefix)):
            owners[path] = _unit_name(prefix)
            used.add(pattern)
            break
    if len(used) < len(set(patterns)):
        known = list(dict.fromkeys(prefix for path in leaves for prefix in _prefixes(path)))
        idle = [f"{pattern!r}{glob_meant(pattern, known)}" for pattern in patterns if pattern not in used]
        raise PlanError(lines("patterns in units= match no subtree:", idle, f"Paths are like {next(iter(leaves))!r}."))
    return owners


def owned_by(leaves: Mapping[str, Any], units: Sequence[str]) -> dict[str, str]:
    """The owner of each leaf of a split module: the unit whose path is a prefix of the leaf's."""
    known = set(map(_unit_name, units))
    return {path: next((prefix for prefix in _prefixes(path) if prefix in known), ROOT) for path in leaves}


def _prefixes(path: str) -> list[str]:
    """The paths of the subtrees that a leaf lies in, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _unit_name(name: str) -> str:
    """A name that is not the one of the code between units."""
    if name == ROOT:
        raise PlanError(f"a unit cannot be called {ROOT!r}, which names the code between units: rename the submodule")
    return name
