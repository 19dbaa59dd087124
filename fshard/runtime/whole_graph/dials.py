"""The numbers that change from one replay of a step to the next, in device memory."""

from typing import Any

import torch
from torch import Tensor

from fshard.optim.base import rate
from fshard.runtime.execution import PendingUpdate

RATE, COUNT, SKIP, SEED, KEY, FEEDBACK, UNIT, DIVISORS = range(8)
"""Places of the learning rate, the number of the update, whether nothing is updated, the seed of the backward,
the key of stochastic rounding, as the bits of an int64, what residuals are multiplied by when they are added, and when
they are kept, and of what gradients are divided by, one for each rule of clipping."""


class Dials:
    """The dials of a step: one vector in float64, and a copy in float32, which kernels of optimizers read.

    Args:
        device: where steps run.
        rules: the number of clipping rules.
    """

    def __init__(self, device: torch.device, rules: int) -> None:
        count = DIVISORS + rules
        self.pinned = device.type == "cuda"
        self.wide = torch.zeros(count, dtype=torch.float64, device=device)
        self.short = torch.zeros(count, dtype=torch.float32, device=device)

    def write(self, update: PendingUpdate | None, seed: float, feedback: float) -> None:
        """Set the dials for a step: one copy, which the host does not wait for.

        Args:
            update: the update that waits; None if nothing is to be updated.
            seed: the gradient of a loss from which its backward starts.
            feedback: what residuals are multiplied by when they are added to gradients.
        """
        values, key = [0.0, 1.0, 1.0, seed, 0.0, feedback, 1.0, *[1.0] * (len(self.wide) - DIVISORS)], 0
        if update is not None:
            number = update.step + 1
            scales = [1.0 if scale is None else scale for scale in update.scale]
            values = [rate(update.opt.lr, number), float(number), 0.0, seed, 0.0, feedback, update.unit, *scales]
            key = 0 if update.rounding is None else update.rounding.key(update.step)
        given = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=self.pinned)
        given.view(torch.int64)[KEY] = key
        self.wide.copy_(given, non_blocking=True)

    def begin(self) -> None:
        """Make the copy in float32: the first kernel of a graph."""
        self.short.copy_(self.wide)

    @property
    def seed(self) -> Tensor:
        """The gradient of a loss, 0-dim."""
        return self.wide[SEED]

    @property
    def feedback(self) -> Tensor:
        """The factor of residuals that are added to gradients, 0-dim."""
        return self.wide[FEEDBACK]

    @property
    def unit(self) -> Tensor:
        """The factor of residuals that are kept, 0-dim."""
        return self.wide[UNIT]

    @property
    def skip(self) -> Tensor:
        """The flag of a step that updates nothing, bool, 0-dim."""
        return self.wide[SKIP] > 0

    @property
    def key(self) -> Tensor:
        """The key of stochastic rounding, int64, 0-dim."""
        return self.wide.view(torch.int64)[KEY]

    def of(self, limit: int, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the optimizer's update, for slices of a clipping rule whose gradients are of a dtype."""
        divisors = self.wide if torch.promote_types(dtype, torch.float32) == torch.float64 else self.short
        return {
            "grad_scale": divisors[DIVISORS + limit],
            "found_inf": self.short[SKIP],
            "numbers": (self.short[RATE], self.short[COUNT]),
        }
