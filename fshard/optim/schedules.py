"""Learning rates over time: frozen values that are pure functions of the step.

The step counts from 0, which is the first update. After its end a schedule keeps its last rate, so a run
may be longer than planned. Any other function of an int that returns a float is a schedule too.
"""

import math
from dataclasses import dataclass

from fshard import errors
from fshard.optim import checks


@dataclass(frozen=True)
class constant:  # noqa: N801 - reads as the function it is, like all schedules
    """The same rate at each step.

    >>> constant(0.1)(1000)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        if problems := checks.number("value", self.value):
            raise errors.bad_arguments("constant", problems)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        return float(self.value)


@dataclass(frozen=True)
class linear:  # noqa: N801
    """A straight line from ``start`` at step 0 to ``stop`` at step ``steps``, and ``stop`` from there on.

    >>> linear(1.0, 0.0, steps=4)(1)
    0.75
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        problems = checks.number("start", self.start) + checks.number("stop", self.stop)
        if problems := problems + checks.count("steps", self.steps, least=1):
            raise errors.bad_arguments("linear", problems)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        return _between(self.start, self.stop, min(step / self.steps, 1.0))


@dataclass(frozen=True)
class warmup_linear:  # noqa: N801
    """A rise over ``warmup`` steps to ``peak``, then a straight line down to ``floor`` at step ``total``.

    The rise has equal increments and starts at ``peak / (warmup + 1)``, not at zero: no update is wasted.

    Args:
        peak: the rate at step ``warmup``.
        warmup: how many steps are below the peak at first; 0 starts at the peak.
        total: the step from which on the rate is ``floor``; above ``warmup``.
        floor: the last rate, in [0, peak].

    >>> [round(warmup_linear(1.0, warmup=3, total=5)(step), 2) for step in range(7)]
    [0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0]
    """

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup("warmup_linear", self.peak, self.warmup, self.total, self.floor)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        return _between(self.peak, self.floor, min((step - self.warmup) / (self.total - self.warmup), 1.0))


@dataclass(frozen=True)
class warmup_cosine:  # noqa: N801
    """A rise over ``warmup`` steps to ``peak``, then half a cosine down to ``floor`` at step ``total``.

    The rise has equal increments and starts at ``peak / (warmup + 1)``, not at zero: no update is wasted. The
    cosine is that of Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        peak: the rate at step ``warmup``.
        warmup: how many steps are below the peak at first; 0 starts at the peak.
        total: the step from which on the rate is ``floor``; above ``warmup``.
        floor: the last rate, in [0, peak].

    >>> [round(warmup_cosine(1.0, warmup=1, total=5)(step), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup("warmup_cosine", self.peak, self.warmup, self.total, self.floor)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        done = min((step - self.warmup) / (self.total - self.warmup), 1.0)
        return _between(self.peak, self.floor, 0.5 - 0.5 * math.cos(math.pi * done))


def _between(start: float, stop: float, fraction: float) -> float:
    """The point between two rates; exactly ``start`` at 0 and ``stop`` at 1."""
    return start * (1.0 - fraction) + stop * fraction


def _check_warmup(name: str, peak: float, warmup: int, total: int, floor: float) -> None:
    """Raise PlanError unless a rise and a fall can be made of these."""
    problems = checks.number("peak", peak) + checks.number("floor", floor)
    if not problems and floor > peak:
        problems.append(f"floor = {floor!r}: must not be above peak = {peak!r}")
    steps = checks.count("warmup", warmup, least=0) + checks.count("total", total, least=1)
    if not steps and total <= warmup:
        steps.append(f"total = {total}: must be above warmup = {warmup}")
    if problems + steps:
        raise errors.bad_arguments(name, problems + steps)
