"""Arguments out of range, described. Checks return their problems; a constructor reports all at once."""

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeGuard

from torch import Tensor

from fshard import errors
from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.patterns import bad_regex

Want = str | Callable[[str, Any], list[str]]
"""What is wanted of an argument: an interval for ``number``, or another function of this module."""


def require(made: object, *further: str, **wants: Want) -> None:
    """Refuse an object whose attributes are not what is wanted, or that has ``further`` problems, in one report."""
    problems: list[str] = []
    for name, want in wants.items():
        value = getattr(made, name)
        problems += number(name, value, want) if isinstance(want, str) else want(name, value)
    if problems or further:
        raise errors.bad_arguments(type(made).__name__, [*problems, *further])


def number(name: str, value: Any, interval: str = "[0, inf)") -> list[str]:
    """No problem when the value is a real number inside the interval, which is written as in mathematics.

    >>> number("beta", 0.9, "[0, 1)"), number("beta", 1, "[0, 1)")
    ([], ['beta = 1: must lie in [0, 1)'])
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return [f"{name} = {value!r}: must be a number in {interval}"]
    x = float(value)
    low, high = map(float, interval[1:-1].split(","))
    above = x >= low if interval.startswith("[") else x > low
    below = x <= high if interval.endswith("]") else x < high
    return [] if above and below else [f"{name} = {value!r}: must lie in {interval}"]


def count(name: str, value: Any, least: int = 1) -> list[str]:
    """No problem when the value is an int, at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        return [f"{name} = {value!r}: must be an int, a number of steps"]
    return [] if value >= least else [f"{name} = {value}: must be at least {least}"]


def rate(name: str, value: Any) -> list[str]:
    """No problem when the value can be a learning rate: a finite number >= 0, or a function."""
    if callable(value) and not isinstance(value, type):
        return []
    if isinstance(value, Tensor):
        return [f"{name} = {value!r}: is a tensor, which a step would not watch: give a number, such as float(lr)"]
    return [f"{problem}, or a function of the step" for problem in number(name, value)]


def betas(name: str, value: Any) -> list[str]:
    """No problem when the value is a pair of decay rates."""
    if not isinstance(value, tuple) or len(value) != 2:
        return [f"{name} = {value!r}: must be a tuple of two numbers in [0, 1)"]
    return [problem for i, beta in enumerate(value) for problem in number(f"{name}[{i}]", beta, "[0, 1)")]


def pattern(name: str, value: Any) -> list[str]:
    """No problem when the value is a regular expression."""
    return [f"{name}: {problem}"] if (problem := bad_regex(value)) else []


def is_optimizer(value: Any) -> TypeGuard[Optimizer]:
    """Tell whether a value has what an optimizer has, and is not its class."""
    return isinstance(value, Optimizer) and not isinstance(value, type)


def optimizer_meant(value: Any) -> str:
    """A hint at the optimizer to give instead of this value; empty for an optimizer."""
    kind = value if isinstance(value, type) else type(value)
    if is_optimizer(value):
        return ""
    if kind.__module__.startswith("torch.optim"):
        return f": give fs.optim.{kind.__name__.lower()}(lr), or fs.optim.from_torch(torch.optim.{kind.__name__}, ...)"
    if isinstance(value, type):
        return f": make one, fs.optim.{kind.__name__}(3e-4)"
    return ""


def optimizer(name: str, value: Any) -> list[str]:
    """No problem when the value is an optimizer that may be inside of another one."""
    if is_optimizer(value):
        if contract(value).steps is None:
            return []
        return [f"{name} = {value!r}: fs.optim.every must be the outermost optimizer: the whole step takes part in it"]
    return [f"{name} = {value!r}: must be an optimizer, such as fs.optim.adamw(3e-4)"]


def decay(name: str, value: Any) -> list[str]:
    """No problem when the value can say which leaves decay."""
    if isinstance(value, str):
        return pattern(name, value)
    if value is not None and not callable(value):
        return [f"{name} = {value!r}: must be None, a regex over paths, or a function of path and shape"]
    return []


DECAYING: dict[str, Want] = {"weight_decay": "[0, inf)", "decay": decay}
"""What is wanted of the arguments about weight decay."""
