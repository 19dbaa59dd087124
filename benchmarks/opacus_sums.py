"""Sums of clipped gradients by Opacus's ghost clipping, for functional.py."""

from typing import Any

import torch
from torch import Tensor, nn


class RowLosses(nn.Module):
    """A mean over the outputs of each row, as Opacus wants losses."""

    reduction = "sum"

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        """A loss for each row."""
        return (out - target).square().mean(1)


class Opacus:
    """The sum of clipped gradients by Opacus's ghost clipping, which needs one process and two backwards."""

    def __init__(self, net: nn.Module, norm: float) -> None:
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
        from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        self.net = net
        self.wrapped = GradSampleModuleFastGradientClipping(self.net, max_grad_norm=norm, loss_reduction="sum")
        self.optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(self.net.parameters(), lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=norm,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        self.losses = DPLossFastGradientClipping(self.wrapped, self.optimizer, RowLosses(), "sum")

    def clipped(self, x: Tensor) -> dict[str, Any]:
        """The sum."""
        self.optimizer.zero_grad()
        self.losses(self.wrapped(x), torch.ones_like(x)).backward()
        return {name: parameter.grad for name, parameter in self.net.named_parameters()}
