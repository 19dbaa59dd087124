"""The module that a plan was made for, for what its own library says of it: names in files, initial values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fshard.errors import PlanError


@dataclass(frozen=True, eq=False)
class Code:
    """A module without values. Copies share it, and pickles lack it: plans travel, and code may not.

    Attributes:
        module: the module; None in a plan that was pickled, or is one of a tree.
    """

    module: torch.nn.Module | None = None

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The paths of the modules in evaluation mode; ``"all"`` for the whole module."""
        modes = {} if self.module is None else {name: below.training for name, below in self.module.named_modules()}
        found = tuple([name for name, training in modes.items() if not training])
        return ("all",) if found and len(found) == len(modes) else found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Code":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Code, ()


def code_of(model: Any) -> Code:
    """The code of what ``make_plan`` is given; that of a tree is none. A module itself is a PlanError."""
    if isinstance(model, torch.nn.Module):
        raise PlanError(
            f"make_plan was given the module {type(model).__name__} itself: call fs.split(module, units=...) first"
        )
    module = getattr(model, "module", None)
    return Code(module if isinstance(module, torch.nn.Module) else None)


INITIALIZING = ("_init_weights", "init_weights", "initialize_weights", "reset_parameters")
"""The names by which methods are known that give a module's parameters their first values."""


def initialized_by(module: torch.nn.Module | None, paths: Iterable[str]) -> dict[str, str]:
    """The method of a module above the owner of each parameter that gives it its values; only those that have one.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up = torch.nn.Linear(2, 2, bias=False)
    ...     def _init_weights(self, module):
    ...         torch.nn.init.ones_(module.weight)
    >>> initialized_by(Net(), ["up.weight"])
    {'up.weight': 'Net._init_weights'}
    """
    found: dict[str, str] = {}
    for path, below in () if module is None else module.named_modules():
        kind = type(below)
        method = next((name for name in INITIALIZING if callable(getattr(kind, name, None))), None)
        if method is not None and not kind.__module__.startswith("torch.") and any(True for _ in below.children()):
            found[f"{path}." if path else ""] = f"{kind.__name__}.{method}"
    out = {}
    for path in paths:
        owner = path.rpartition(".")[0]
        above = next((method for prefix, method in found.items() if owner and path.startswith(prefix)), None)
        if above is not None:
            out[path] = above
    return out
