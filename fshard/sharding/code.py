"""The module that a plan was made for, for what its own library says of it: names in files, initial values."""

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
