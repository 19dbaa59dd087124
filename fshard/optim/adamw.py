"""AdamW: Adam with weight decay that does not pass through the moments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Fused, Rate, State, States, Tensors
from fshard.optim.decay import Decay, Decaying
from fshard.torch_internals import fused_adamw_


@dataclass(frozen=True)
class adamw(Decaying, Fused):  # noqa: N801 - reads as the function it is in a train script
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

    Equal to ``torch.optim.AdamW``.

    Args:
        lr: the learning rate, >= 0, or a function of the step.
        betas: the decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment; above 0, or elements without a gradient become nan.
        weight_decay: the fraction of a parameter that an update of learning rate 1 takes away, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.

    Raises:
        PlanError: arguments out of range, all in one report.

    >>> fs.optim.adamw(3e-4, weight_decay=0.1, decay=r".*weight").hyper("norm.bias", (8,))
    0.0
    """

    capturable = True

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay: Decay = None

    def __post_init__(self) -> None:
        checks.require(self, lr=checks.rate, betas=checks.betas, eps="(0, inf)", **checks.DECAYING)

    def init(self, param: Tensor) -> State:
        """Both moments, zero."""
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    def _fused(
        self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: float, **scaling: Any
    ) -> None:
        # Kernels read the step from a tensor on their own device, and only read it: one serves every slice. A
        # fill needs no copy from the host, so it never waits for the device.
        count: Tensor | int = step  # which is a tensor in a graph
        if not isinstance(count, Tensor):
            count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        fused_adamw_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [count] * len(params),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=hyper,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            **scaling,
        )
