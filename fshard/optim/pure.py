"""Optimizers as differentiable functions of tensors: new values instead of new contents, in ordinary operators."""

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.optim.adamw import adamw
from fshard.optim.base import Optimizer, State, rate
from fshard.optim.sgd import sgd


def check_pure(opt: Optimizer) -> sgd | adamw:
    """The optimizer, if it has a differentiable form.

    Raises:
        PlanError: it is neither ``sgd`` nor ``adamw``.
    """
    if not isinstance(opt, sgd | adamw):
        raise PlanError(f"{opt!r} has no differentiable form: use fs.optim.sgd or fs.optim.adamw")
    return opt


def pure_update(
    opt: sgd | adamw, param: Tensor, grad: Tensor, state: State, step: int, hyper: float
) -> tuple[Tensor, State]:
    """One update of one leaf, equal to ``opt.update`` up to rounding; nothing is written.

    Args:
        opt: ``sgd`` or ``adamw``.
        param: a leaf of any shape.
        grad: its gradient.
        state: its buffers, as ``opt.init`` names them.
        step: the number of the update, counted from 1.
        hyper: what ``opt.hyper`` says of the leaf.
    """
    lr = rate(opt.lr, step)
    if isinstance(opt, sgd):
        direction = grad + hyper * param
        if not opt.momentum:
            return param - lr * direction, {}
        before = state["momentum_buffer"]
        kept = direction if step == 1 else opt.momentum * before + (1 - opt.dampening) * direction
        direction = direction + opt.momentum * kept if opt.nesterov else kept
        return param - lr * direction, {"momentum_buffer": kept}
    (b1, b2), decayed = opt.betas, param * (1 - lr * hyper)
    first = b1 * state["exp_avg"] + (1 - b1) * grad
    second = b2 * state["exp_avg_sq"] + (1 - b2) * grad.square()
    # The root has no derivative at zero: where no gradient ever was, it is kept out of the graph.
    seen = second > 0
    root = torch.where(seen, torch.where(seen, second, 1.0).sqrt(), 0.0) / (1 - b2**step) ** 0.5
    moved = decayed - lr / (1 - b1**step) * first / (root + opt.eps)
    return moved, {"exp_avg": first, "exp_avg_sq": second}
