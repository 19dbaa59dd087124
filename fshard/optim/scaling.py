"""Dynamic loss scaling: what a loss is multiplied by so that small float16 gradients do not vanish."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fshard import errors
from fshard.optim import checks


class Scale(NamedTuple):
    """Where loss scaling stands; a part of the train state.

    Attributes:
        value: what losses are multiplied by.
        good: how many steps in a row have had a finite gradient since the value last changed.
    """

    value: float
    good: int = 0


@dataclass(frozen=True)
class LossScale:
    """How the scale of the loss adapts, as that of ``torch.amp.GradScaler``.

    See Micikevicius et al., "Mixed Precision Training", 2018. Given to ``fs.make_train_step(loss_scale=)``. The state
    holds where it stands, so a checkpoint does too. A step whose gradient is not finite, on any rank, is skipped on
    all: parameters, optimizer state and step number stay.

    Args:
        initial: the first scale.
        growth: what the scale is multiplied by after ``interval`` steps in a row with a finite gradient, >= 1.
        backoff: what it is multiplied by after a step without, in (0, 1).
        interval: see ``growth``.
        least: the smallest scale. A gradient that is not finite there is an error, as without scaling.

    Raises:
        PlanError: arguments out of range, all in one report.

    >>> rule = LossScale(initial=4.0, interval=2)
    >>> rule.after(rule.after(rule.start(), finite=True), finite=True)
    Scale(value=8.0, good=0)
    >>> rule.after(Scale(8.0, 1), finite=False)
    Scale(value=4.0, good=0)
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        problems = checks.number("initial", self.initial, "(0, inf)") + checks.number("growth", self.growth, "[1, inf)")
        problems += checks.number("backoff", self.backoff, "(0, 1)") + checks.count("interval", self.interval, 1)
        problems += checks.number("least", self.least, "(0, inf)")
        if not problems and self.least > self.initial:
            problems.append(f"least = {self.least}: must be at most initial, {self.initial}")
        if problems:
            raise errors.bad_arguments("LossScale", problems)

    def start(self) -> Scale:
        """The scale of a state that has none yet."""
        return Scale(float(self.initial))

    def after(self, scale: Scale, *, finite: bool) -> Scale:
        """The scale after a step."""
        if not finite:
            return Scale(max(scale.value * self.backoff, self.least))
        if scale.good + 1 < self.interval:
            return Scale(scale.value, scale.good + 1)
        grown = scale.value * self.growth
        return Scale(grown if math.isfinite(grown) and grown <= HIGHEST else scale.value)


HIGHEST = 2.0**32
"""No gradient is small enough to need more, and float32 sums have room above it."""


def divisor(narrow: bool, summed_narrow: bool, parts: int) -> float:
    """What gradients are divided by before they are summed over the parts of the global batch; the rest comes after.

    Dividing before a sum keeps it from overflowing, and loses small float16 gradients where the parts are many. Where
    sums are in a wider dtype they cannot overflow, so that nothing need be divided before; where they are in float16
    themselves, half of the division comes before and half behind (FSDP's split of the world size).

    Args:
        narrow: whether gradients are float16 before they are summed.
        summed_narrow: whether sums are float16.
        parts: the number of terms.

    >>> divisor(False, False, 6), divisor(True, False, 6), divisor(True, True, 64), divisor(True, True, 6)
    (6.0, 1.0, 8.0, 4.0)
    """
    if not narrow:
        return float(parts)
    return 2.0 ** math.ceil(math.log2(parts) / 2) if summed_narrow else 1.0
