"""Dynamic loss scaling: a factor on the loss keeps small float16 gradients from vanishing."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fshard.optim import checks


class Scale(NamedTuple):
    """The state of loss scaling: the factor on losses, and steps in a row with a finite gradient since it changed."""

    value: float
    good: int = 0


@dataclass(frozen=True)
class LossScale:
    """A rule that adapts the scale of the loss, as ``torch.amp.GradScaler`` does.

    See Micikevicius et al., "Mixed Precision Training", 2018. Given to ``fs.make_train_step(loss_scale=)``. The
    train state holds its state, and so does a checkpoint. A step whose gradient is not finite, on any rank, is skipped
    on all: parameters, optimizer state and step number stay.

    Args:
        initial: the first scale.
        growth: the factor on the scale after ``interval`` steps in a row with a finite gradient, >= 1.
        backoff: the factor after a step without one, in (0, 1).
        interval: see ``growth``.
        least: the smallest scale. A gradient that is not finite there is an error, as without scaling.

    Raises:
        PlanError: arguments out of range, all in one report.

    >>> rule = fs.LossScale(initial=4.0, interval=2)
    >>> rule.after(rule.after(rule.start(), finite=True), finite=True)
    Scale(value=8.0, good=0)
    >>> rule.after(rule.start(), finite=False)
    Scale(value=2.0, good=0)
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        wants: dict[str, checks.Want] = {"initial": "(0, inf)", "growth": "[1, inf)", "backoff": "(0, 1)"}
        checks.require(self, **wants, interval=checks.count, least="(0, inf)")
        if self.least > self.initial:
            checks.require(self, f"least = {self.least}: must be at most initial, {self.initial}")

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
"""No gradient needs more, and float32 sums do not overflow at it."""


def divisor(narrow: bool, summed_narrow: bool, parts: int) -> float:
    """The divisor of gradients before their sum over the parts of the global batch; the sum is divided by the rest.

    Dividing first keeps a sum from overflowing, but loses small float16 gradients where the parts are many. Sums in a
    wider dtype cannot overflow, so they need no division before; with float16 sums, half of the division comes before
    and half after (FSDP's split of the world size). ``narrow``, ``summed_narrow``: gradients, and sums, are float16.

    >>> divisor(False, False, 6), divisor(True, False, 6), divisor(True, True, 64), divisor(True, True, 6)
    (6.0, 1.0, 8.0, 4.0)
    """
    if not narrow:
        return float(parts)
    return 2.0 ** math.ceil(math.log2(parts) / 2) if summed_narrow else 1.0
