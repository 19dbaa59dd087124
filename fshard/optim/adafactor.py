"""Adafactor: a second moment of a matrix that is a row times a column."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused
from fshard.optim.decay import Decay, Decaying
from fshard.optim.form import Form, Grain, zeros

Hyper = tuple[tuple[int, ...], float]
"""The leaf's shape and its weight decay."""


@dataclass(frozen=True)
class adafactor(Decaying, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """Adafactor (Shazeer and Stern, "Adaptive Learning Rates with Sublinear Memory Cost", 2018).

    Equal to ``torch.optim.Adafactor``. Of a matrix it keeps the mean square of each row and each column, of a vector
    the mean square of each element; updates have the scale of the leaf and a bounded norm. So it needs whole leaves:
    give rules ``align="leaf"``, or replicate. A rank then updates its leaves by itself.

    Args:
        lr: the largest relative step, >= 0, or a function of the step; update t takes at most ``1 / sqrt(t)``.
        beta2_decay: at most 0; update t keeps ``1 - t ** beta2_decay`` of the mean squares.
        eps: the least mean square, None for the dtype's own, and the least scale of a leaf; both >= 0.
        clip: the largest root mean square of an update, at least 1.
        weight_decay: the fraction of a parameter that an update of learning rate 1 takes away, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.

    Raises:
        PlanError: arguments out of range. From ``fs.init_state``: leaves that are cut.

    >>> opt = fs.optim.adafactor(0.01)
    >>> {name: form.shape for name, form in opt.forms(opt.hyper("w", (8, 3))).items()}
    {'row_var': (8,), 'col_var': (3,)}
    """

    lr: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    clip: float = 1.0
    weight_decay: float = 0.0
    decay: Decay = None

    def __post_init__(self) -> None:
        if isinstance(self.eps, tuple) and len(self.eps) == 2:
            given = [(f"eps[{i}]", eps) for i, eps in enumerate(self.eps) if i or eps is not None]
            more = [problem for pair in given for problem in checks.number(*pair)]
        else:
            more = [f"eps = {self.eps!r}: must be a tuple of two numbers; the first may be None"]
        checks.require(self, *more, lr=checks.rate, beta2_decay="(-inf, 0]", **checks.DECAYING, clip="[1, inf)")

    def init(self, param: Tensor, hyper: Hyper) -> State:
        """Mean squares, zero."""
        return zeros(self.forms(hyper), param)

    def hyper(self, path: str, shape: tuple[int, ...]) -> Hyper:
        """The leaf's shape and its weight decay."""
        return tuple(shape), self.decay_of(path, shape)

    def forms(self, hyper: Hyper) -> dict[str, Form]:
        """A number for each row and each column of a matrix, or one for each element of a vector."""
        shape, _ = hyper
        if len(shape) < 2:
            return {"variance": Form()}
        return {"row_var": Form(shape=shape[:-1]), "col_var": Form(shape=(*shape[:-2], shape[-1]))}

    def grain(self, hyper: Hyper) -> Grain:
        """Whole leaves."""
        return "leaf"

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: Hyper) -> None:
        for param, grad, state in zip(params, grads, states, strict=True):
            if param.numel():
                self._leaf(param.view(hyper[0]), grad.view(hyper[0]), state, step, lr, hyper[1])

    def _leaf(self, param: Tensor, grad: Tensor, state: State, step: int, lr: float, decay: float) -> None:
        new = float(step) ** self.beta2_decay
        eps = torch.finfo(param.dtype).eps if self.eps[0] is None else self.eps[0]
        root = math.sqrt(param.numel())
        alpha = (param.norm() / root).clamp(min=self.eps[1]) * min(lr, 1 / math.sqrt(step))
        if decay:
            param.mul_(1 - lr * decay)
        if param.ndim > 1:
            row = state["row_var"].view(*param.shape[:-1], 1)
            column = state["col_var"].view(*param.shape[:-2], 1, param.shape[-1])
            row.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(param.shape[-1]), new)
            column.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(param.shape[-2]), new)
            update = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps))
        else:
            state["variance"].lerp_(grad.reshape(-1).square(), new)
            update = state["variance"].view(param.shape).clone()
        update.clamp_(min=eps * eps).rsqrt_().mul_(grad)
        size = (update.norm() / (root * self.clip)).clamp(min=1.0)
        param.sub_(update.mul_(alpha / size))
