"""Units: pure functions of a parameter tree. An engine runs the calls of units that receive its tensors.

A unit called with ordinary tensors is an ordinary function. An engine puts a ``Slot`` on the tensors that it gives to a
program, and a unit called with such tensors asks the engine to run it. The slot travels on the tensors and not in a
global, so nothing is switched on or off, and two engines can run in one process.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fshard import tree
from fshard.arguments import described, expect
from fshard.errors import PlanError
from fshard.model.precision import Casting
from fshard.tree import Tree

_ATTRIBUTE = "_fshard_slot"


class UnitEngine(Protocol):
    """Runs the units of a program."""

    def call(self, unit: "Unit", params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``unit.fn(params, *args, **kwargs)``, and return its result."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The mark of an engine's parameter tensor. The engine runs the calls of units that receive the tensor.

    By their maker, ``instances`` are the copies of modules that hold the tensor; they live as long as the tensor.
    """

    engine: UnitEngine
    path: str  # of the leaf in the whole parameter tree
    casting: Casting | None = None  # of inputs and results of units
    shape: tuple[int, ...] | None = None  # the whole leaf's, whatever part of it the tensor holds; None if unknown
    stopped: bool = False  # gradients do not flow into the leaf: see ``fs.stop_gradient``
    instances: dict[Any, Any] = field(default_factory=dict, repr=False)


def slot_of(tensor: Any) -> Slot | None:
    """The slot of a tensor, if it has one. Views and results of operations have none."""
    return getattr(tensor, _ATTRIBUTE, None)


def attach(tensor: Tensor, slot: Slot) -> None:
    """Put a slot on a tensor: on this Python object, not on its storage or its views."""
    setattr(tensor, _ATTRIBUTE, slot)


@dataclass(frozen=True, eq=False, repr=False)
class Unit:
    """A pure function whose first argument is a parameter tree: the grain of compute. ``unit(fn)`` makes one.

    Two units are equal only if they are the same object, so any callable can be one.

    Attributes:
        name: the path of the module it came from; empty for a hand-written function.
        fn: ``fn(params, *args, **kwargs)``.
        prepare: makes the function of ``*args, **kwargs`` for a params tree whose leaves stay the same objects, once
            for many calls; None for ``fn`` with the tree.
        buffers: whether the first argument after the tree is a dict of buffers, and the result a pair of the computed
            value and the changed buffers.
    """

    name: str
    fn: Callable[..., Any]
    prepare: Callable[[Tree], Callable[..., Any]] | None = None
    buffers: bool = False

    def __call__(self, params: Tree, /, *args: Any, **kwargs: Any) -> Any:
        return self.on(params)(args, kwargs)

    def on(self, params: Tree) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The unit as a function of ``(args, kwargs)``, for as long as the tree holds the same tensors."""
        slot = _first_slot(params)
        if slot is None:
            return lambda args, kwargs: self.fn(params, *args, **kwargs)
        if slot.casting is not None:
            return functools.partial(slot.casting.call, self, slot, params)
        return functools.partial(slot.engine.call, self, params)

    def __repr__(self) -> str:
        return f"unit({self.name or getattr(self.fn, '__name__', type(self.fn).__name__)})"


def unit(fn: Callable[..., Any]) -> Unit:
    """Mark a hand-written pure function as a unit. Usable as a decorator.

    Args:
        fn: ``fn(params, *args, **kwargs)``; ``params``, given by position, is the tree of parameters that it reads.
            It must not write to its arguments, and must read no other tensor.

    Returns:
        A ``Unit`` with the function's name and docstring.

    Raises:
        PlanError: ``fn`` is not a function.

    >>> @fs.unit
    ... def scale(params, x):
    ...     return params["w"] * x
    >>> scale({"w": 2.0}, 3.0), scale
    (6.0, unit(scale))
    """
    if isinstance(fn, Unit):
        return fn
    if isinstance(fn, type):
        wanted = "a function (params, *args); modules become units by fs.split(module, units=...)"
        raise PlanError(f"fs.unit(fn): fn is {described(fn)}: give {wanted}")
    expect("fs.unit(fn)", [("fn", fn, Callable, "a function (params, *args)")])
    made = Unit("", fn)
    names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(fn, name)]
    # The class is frozen, so functools.update_wrapper cannot write to it.
    vars(made).update({name: getattr(fn, name) for name in names}, __wrapped__=fn)
    return made


def _first_slot(params: Tree) -> Slot | None:
    # Every call walks its tree: for nested dicts, optree's flattening would cost five times as much.
    if type(params) is dict:
        for below in params.values():
            slot = _first_slot(below)
            if slot is not None:
                return slot
        return None
    if isinstance(params, Tensor):
        return slot_of(params)
    return next((slot for slot in map(slot_of, tree.leaves(params)) if slot is not None), None)
