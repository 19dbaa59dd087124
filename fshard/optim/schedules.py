"""Learning rates over time: frozen values that are pure functions of the step.

The step counts from 0, which is the first update. After its end a schedule keeps its last rate, so a run
may be longer than planned. Any other function of an int that returns a float is a schedule too.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

from fshard.hints import unknown_name
from fshard.optim import checks

__all__ = ["constant", "linear", "warmup_cosine", "warmup_linear", "warmup_stable_decay"]


@dataclass(frozen=True)
class constant:  # noqa: N801 - reads as the function it is, like all schedules
    """The same rate at each step.

    Args:
        value: the rate, >= 0.

    >>> fs.optim.schedules.constant(0.1)(1000)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        checks.require(self, value="[0, inf)")

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        return float(self.value)


@dataclass(frozen=True)
class linear:  # noqa: N801
    """A straight line from ``start`` at step 0 to ``stop`` at step ``steps``, and ``stop`` from there on.

    Args:
        start: the rate at step 0.
        stop: the rate from step ``steps`` on.
        steps: the number of steps between them.

    >>> fs.optim.schedules.linear(1.0, 0.0, steps=4)(1)
    0.75
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        checks.require(self, start="[0, inf)", stop="[0, inf)", steps=checks.count)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        return _between(self.start, self.stop, min(step / self.steps, 1.0))


@dataclass(frozen=True)
class Warmup:
    """A rise over ``warmup`` steps to ``peak``, then a fall to ``floor`` at step ``total``."""

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        problems = _ends(self.peak, self.floor)
        steps = checks.count("warmup", self.warmup, least=0) + checks.count("total", self.total)
        if not steps and self.total <= self.warmup:
            steps.append(f"total = {self.total}: must be above warmup = {self.warmup}")
        checks.require(self, *problems, *steps)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        return _between(
            self.peak, self.floor, self._fallen(min((step - self.warmup) / (self.total - self.warmup), 1.0))
        )

    def _fallen(self, done: float) -> float:
        """The part of the fall that is over after a part of its time."""
        return done


class warmup_linear(Warmup):  # noqa: N801
    """A rise over ``warmup`` steps to ``peak``, then a straight line down to ``floor`` at step ``total``.

    The rise has equal increments and starts at ``peak / (warmup + 1)``, not at zero: no update is wasted.

    Args:
        peak: the rate at step ``warmup``.
        warmup: how many steps are below the peak at first; 0 starts at the peak.
        total: the step from which on the rate is ``floor``; above ``warmup``.
        floor: the last rate, in [0, peak].

    >>> [round(fs.optim.schedules.warmup_linear(1.0, warmup=3, total=5)(step), 2) for step in range(7)]
    [0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0]
    """


class warmup_cosine(Warmup):  # noqa: N801
    """A rise over ``warmup`` steps to ``peak``, then half a cosine down to ``floor`` at step ``total``.

    The rise has equal increments and starts at ``peak / (warmup + 1)``, not at zero: no update is wasted. The
    cosine is that of Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        peak: the rate at step ``warmup``.
        warmup: how many steps are below the peak at first; 0 starts at the peak.
        total: the step from which on the rate is ``floor``; above ``warmup``.
        floor: the last rate, in [0, peak].

    >>> [round(fs.optim.schedules.warmup_cosine(1.0, warmup=1, total=5)(step), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def _fallen(self, done: float) -> float:
        return 0.5 - 0.5 * math.cos(math.pi * done)


@dataclass(frozen=True)
class warmup_stable_decay:  # noqa: N801
    """A rise over ``warmup`` steps to ``peak``, a plateau, and a straight line down to ``floor`` at step ``total``.

    A run that is to be longer than planned goes on from a checkpoint of the plateau (Hu et al., "MiniCPM", 2024).

    Args:
        peak: the rate of the plateau.
        warmup: how many steps are below the peak at first; 0 starts at the peak.
        total: the step from which on the rate is ``floor``.
        cooldown: the steps of the fall; with ``warmup`` at most ``total``.
        floor: the last rate, in [0, peak].

    >>> rate = fs.optim.schedules.warmup_stable_decay(1.0, warmup=1, total=6, cooldown=2)
    >>> [round(rate(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    peak: float
    warmup: int
    total: int
    cooldown: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        problems = _ends(self.peak, self.floor)
        steps = checks.count("warmup", self.warmup, least=0) + checks.count("total", self.total)
        steps += checks.count("cooldown", self.cooldown)
        if not steps and self.warmup + self.cooldown > self.total:
            steps.append(f"warmup = {self.warmup} and cooldown = {self.cooldown}: must be at most total = {self.total}")
        checks.require(self, *problems, *steps)

    def __call__(self, step: int) -> float:
        """The rate at this step."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        left = min(1.0, max(0, self.total - step) / self.cooldown)
        return _between(self.floor, self.peak, left)


def _ends(peak: float, floor: float) -> list[str]:
    """The problems of the highest and the last rate."""
    problems = checks.number("peak", peak) + checks.number("floor", floor)
    if not problems and floor > peak:
        problems.append(f"floor = {floor!r}: must not be above peak = {peak!r}")
    return problems


def _between(start: float, stop: float, fraction: float) -> float:
    """The point between two rates; exactly ``start`` at 0 and ``stop`` at 1."""
    return start * (1.0 - fraction) + stop * fraction


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> NoReturn:
    raise unknown_name(__name__, name)
