"""Stochastic gradient descent with momentum."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Fused, Rate, State, States, Tensors
from fshard.optim.decay import Decay, Decaying
from fshard.torch_internals import fused_sgd_


@dataclass(frozen=True)
class sgd(Decaying, Fused):  # noqa: N801 - reads as the function it is in a train script
    """SGD with momentum and weight decay added to the gradient, as in ``torch.optim.SGD``.

    Args:
        lr: the learning rate, >= 0, or a function of the step.
        momentum: how much of the last direction is kept, in [0, 1]; 0 keeps no state.
        nesterov: look ahead along the new direction (Sutskever et al., "On the importance of initialization
            and momentum in deep learning", 2013); needs momentum, and no dampening.
        weight_decay: added to the gradient as ``weight_decay * param``, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.
        dampening: how much of each gradient but the first the momentum leaves out, in [0, 1].

    Raises:
        PlanError: arguments out of range or at odds with one another, all in one report.

    >>> fs.optim.sgd(0.1).init(torch.zeros(3))
    {}
    """

    capturable = True

    lr: Rate
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: Decay = None
    dampening: float = 0.0

    def __post_init__(self) -> None:
        needs = f"needs momentum > 0 and dampening = 0, not {self.momentum!r} and {self.dampening!r}"
        wrong = self.nesterov and (self.momentum == 0 or self.dampening != 0)
        more = [f"nesterov = True: {needs}"] if wrong else []
        checks.require(self, *more, lr=checks.rate, momentum="[0, 1]", **checks.DECAYING, dampening="[0, 1]")

    def init(self, param: Tensor) -> State:
        """The momentum, zero; nothing without momentum."""
        return {"momentum_buffer": torch.zeros_like(param)} if self.momentum else {}

    def _fused(
        self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: float, **scaling: Any
    ) -> None:
        # The first gradient enters the momentum whole, later ones dampened. That it is the first is read off
        # the step number, not off a missing buffer: so the state has one shape for ever, and resumes.
        first = type(step) is int and step == 1  # in a graph it is a tensor, and never the first
        if params[0].device.type == "cpu" and params[0].dtype in (torch.bfloat16, torch.float16):
            if scaling["found_inf"] is None or scaling["found_inf"].item() != 1:
                for param, grad, state in zip(params, grads, states, strict=True):
                    scaled = grad.float() if scaling["grad_scale"] is None else grad.float() / scaling["grad_scale"]
                    self._update_half(param, scaled, state, lr, hyper, first)
            return
        fused_sgd_(
            params,
            grads,
            [state["momentum_buffer"] for state in states] if self.momentum else [],
            weight_decay=hyper,
            momentum=self.momentum,
            lr=lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=first,
            **scaling,
        )

    def _update_half(self, param: Tensor, grad: Tensor, state: State, lr: float, decay: float, first: bool) -> None:
        """One slice in half precision on CPU, given its gradient in float32, and computed in float32.

        The fused CPU kernel is silently wrong there up to PyTorch 2.13: whole SIMD vectors of parameters are
        not written, and those of momentum are written with garbage (pytorch/pytorch#191763).
        """
        value = param.float()
        direction = grad.add(value, alpha=decay)
        if self.momentum:
            buffer = state["momentum_buffer"]
            kept = direction if first else self.momentum * buffer.float() + (1 - self.dampening) * direction
            buffer.copy_(kept)
            direction = direction.add(kept, alpha=self.momentum) if self.nesterov else kept
        param.copy_(value.sub_(direction, alpha=lr))
