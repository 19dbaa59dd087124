"""The specification of a pass, as a value: the same for the trace of a step function and for its runs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fshard.optim.scaling import LossScale
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat
from fshard.runtime.steps.float16 import divisor_of
from fshard.runtime.steps.programs import Programs
from fshard.sharding.plan import Plan


@dataclass(frozen=True, eq=False)
class PassSpec:
    """The function of a pass, and how it runs.

    Attributes:
        fn: the loss function, or for evaluation any function.
        plan: the plan as the pass reads it: leaves that get no gradient are frozen.
        programs: makes programs of the function; told True, in debug mode.
        train: whether there is a backward.
        accumulate: microbatches.
        remat: which units are computed again in their backward.
        loss_scale: how the scale of the loss adapts, if it is scaled for the backward.
    """

    fn: Callable[..., Any]
    plan: Plan
    programs: Callable[[bool], Programs]
    train: bool = True
    accumulate: int = 1
    remat: Remat = NO_REMAT
    loss_scale: LossScale | None = None

    @property
    def parts(self) -> int:
        """Microbatches of the global batch."""
        return self.plan.data_size * self.accumulate

    @functools.cached_property
    def divisor(self) -> float:
        """Return what its gradients are divided by before they are summed, unless the loss is scaled."""
        return divisor_of(self.plan, self.parts, False) if self.train else 1.0
