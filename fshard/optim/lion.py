"""Lion: the sign of a momentum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused
from fshard.optim.decay import Decay, Decaying
from fshard.torch_internals import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


@dataclass(frozen=True)
class lion(Decaying, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

    One buffer where AdamW has two. Every element moves by the learning rate, which should be 3 to 10 times smaller than
    AdamW's, and the weight decay as much larger.

    Args:
        lr: the learning rate, >= 0, or a function of the step.
        betas: how much of the momentum the direction keeps, and the momentum itself, each in [0, 1).
        weight_decay: the fraction of a parameter that an update of learning rate 1 takes away, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.

    Raises:
        PlanError: arguments out of range, all in one report.

    >>> opt, w = fs.optim.lion(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update([w], [torch.tensor([3.0, -0.01])], [opt.init(w)], step=1, hyper=0.0)
    >>> w
    tensor([0.9000, 2.1000])
    """

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    decay: Decay = None

    def __post_init__(self) -> None:
        checks.require(self, lr=checks.rate, betas=checks.betas, **checks.DECAYING)

    def init(self, param: Tensor) -> State:
        """The momentum, zero."""
        return {"exp_avg": torch.zeros_like(param)}

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: float) -> None:
        kept = [state["exp_avg"] for state in states]
        direction = foreach_lerp(kept, grads, 1 - self.betas[0])
        foreach_sign_(direction)
        if hyper:
            foreach_mul_(params, 1 - lr * hyper)
        foreach_add_(params, direction, alpha=-lr)
        foreach_lerp_(kept, grads, 1 - self.betas[1])
