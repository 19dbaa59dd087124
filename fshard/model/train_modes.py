"""A module in training mode and in evaluation mode: private copies that share its tensors."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fshard.arguments import described
from fshard.errors import PlanError
from fshard.model.foreign_objects import tensors_in
from fshard.model.instance import Body
from fshard.patterns import closest


class ModuleModes:
    """The pure functions of a module: as it was split, in training mode, and in evaluation mode.

    Args:
        own: the function of the module as it was split.
        make: makes the function of a copy of the module.
    """

    def __init__(self, own: Body, make: Callable[[nn.Module], Body]) -> None:
        self._own, self._make = own, make
        self._made: dict[bool, Body] = {}
        self._asked: set[tuple[bool | None, str]] = set()

    def of(self, training: bool | None, method: str) -> Body:
        """The function in a mode; None for the mode that each submodule had when the module was split.

        Raises:
            PlanError: the mode is not a bool, the module lacks the method, or that has an argument ``training``.
        """
        if (training, method) not in self._asked:
            _check(self._own.module, training, method)
            self._asked.add((training, method))
        if training is None:
            return self._own
        if training not in self._made:
            self._made[training] = self._in_mode(training)
        return self._made[training]

    def _in_mode(self, training: bool) -> Body:
        if all(below.training == training for below in self._own.module.modules()):
            return self._own
        return self._make(_copy(self._own.module).train(training))


def _copy(module: nn.Module) -> nn.Module:
    """A copy that has attributes of its own, and the module's tensors."""
    held = [x for below in module.modules() for x in tensors_in(vars(below))]
    return copy.deepcopy(module, {id(x): x for x in held})


def _check(module: nn.Module, training: Any, method: Any) -> None:
    name = type(module).__name__
    if training is not None and not isinstance(training, bool):
        raise PlanError(f"apply(training=): training is {described(training)}: give True, False, or None to keep modes")
    found = getattr(module, method, None) if isinstance(method, str) else None
    if not callable(found):
        near = closest(method, dir(type(module))) if isinstance(method, str) else ""
        raise PlanError(f"apply(method=): {described(method)}, is not a method of {name}: give the name of one{near}")
    if training is not None and "training" in inspect.signature(found).parameters:
        raise PlanError(
            f"apply(training=) sets the mode of the module, and {name}.{method} has an argument of that name too: "
            f"rename it, or pass it by position and split the module in the mode that is wanted"
        )
