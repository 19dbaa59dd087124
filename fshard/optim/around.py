"""Optimizers around another one: an average of the parameters, and updates on every k-th step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Optimizer, State, States, Tensors, unscale
from fshard.optim.combinators import Inner
from fshard.optim.contract import at_step, update_of
from fshard.optim.form import Form
from fshard.torch_internals import foreach_add_, foreach_lerp_, foreach_zero_

EMA = "ema"
"""The name under which averaged parameters are kept."""

CARRIED = "carried"
"""The name under which gradients are carried from step to step."""


@dataclass(frozen=True)
class ema(Inner):  # noqa: N801 - reads as the function it is in a train script
    """An exponential moving average of the parameters beside an optimizer, without communication.

    Each rank averages what it holds, right after the update, in float32. The average starts as the first parameters.
    It is read as ``state.opt_state["ema"]``, a tree like ``state.params``; ``fs.averaged(state)`` is a state for eval
    steps whose parameters are the average (Polyak and Juditsky, 1992). It begins with the first parameters;
    ``torch.optim.swa_utils`` begins with those after the first update that it is told of.

    Args:
        opt: the optimizer.
        decay: how much of the average an update keeps, in [0, 1).

    >>> opt, w = fs.optim.ema(fs.optim.sgd(1.0), 0.75), torch.zeros(1)
    >>> state = opt.init(w, 0.0)
    >>> opt.update([w], [torch.tensor([-4.0])], [state], step=1, hyper=0.0)
    >>> w, state["ema"]
    (tensor([4.]), tensor([1.]))
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        twice = ["opt: it keeps an average already"] if isinstance(self.opt, ema) else []
        checks.require(self, *twice, opt=checks.optimizer, decay="[0, 1)")

    def init(self, param: Tensor, hyper: Any) -> State:
        """The optimizer's own buffers, and the parameters as they are."""
        return {**super().init(param, hyper), EMA: param.to(torch.promote_types(param.dtype, torch.float32), copy=True)}

    def forms(self, hyper: Any) -> dict[str, Form]:
        """The buffers of the optimizer, and the average."""
        return {**super().forms(hyper), EMA: Form(wide=True)}

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Any, **more: Any) -> None:
        """Update, then average; see ``Optimizer.update``."""
        update_of(self.opt)(params, grads, states, step=step, hyper=hyper, **more)
        found_inf = more.get("found_inf")
        if params and (found_inf is None or found_inf.item() != 1):
            kept = [state[EMA] for state in states]
            new = [param.to(mean.dtype) for param, mean in zip(params, kept, strict=True)]
            foreach_lerp_(kept, new, 1 - self.decay)


@dataclass(frozen=True)
class every(Inner):  # noqa: N801
    """Update on every k-th step, with the mean gradient of k steps (``optax.MultiSteps``).

    Between updates each rank carries the sum of its gradient shards in the state, as ``state.opt_state["carried"]``.
    The train step takes part: the gradient is that of the mean over all batches since the last update (with
    ``fs.Mean``, over all their elements), and ``clip_norm`` clips that gradient. Learning rates and moments count
    updates, and ``state.step`` counts steps.

    Args:
        steps: k, at least 1.
        opt: the optimizer. It must not be inside of another one.

    >>> fs.optim.every(4, fs.optim.adamw(3e-4)).number(step=8)
    2
    """

    steps: int

    def __init__(self, steps: int, opt: Optimizer) -> None:
        vars(self).update(opt=opt, steps=steps)
        checks.require(self, steps=checks.count, opt=checks.optimizer)

    @property
    def steps_per_update(self) -> int:
        """The number of steps to an update."""
        return self.steps

    def init(self, param: Tensor, hyper: Any) -> State:
        """The optimizer's own buffers, and no gradient."""
        return {**super().init(param, hyper), CARRIED: torch.zeros_like(param)}

    def forms(self, hyper: Any) -> dict[str, Form]:
        """The buffers of the optimizer, and the sum of gradients."""
        return {**super().forms(hyper), CARRIED: Form()}

    def number(self, step: int) -> int:
        """The number of updates made when step number ``step``, counted from 1, is over."""
        return step // self.steps

    def at_step(self, step: int) -> "every":
        """The same with the learning rate of the update that a step, counted from 1, makes or leads to."""
        return every(self.steps, at_step(self.opt, -(-step // self.steps)))

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Any, **more: Any) -> None:
        """Add the gradients to the carried sum, or update with gradients that already hold it.

        The step adds the carried sum before it takes norms; ``grad_scale`` divides the sum over k steps.
        """
        found_inf = more.pop("found_inf", None)
        if not params or (found_inf is not None and found_inf.item() == 1):
            return
        carried = [state[CARRIED] for state in states]
        if step % self.steps:
            unscale(grads, more.get("grad_scale"))
            foreach_add_(carried, grads)
            return
        late = more.get("late", 0)
        more["late"] = self.number(late) if late > 0 else -self.number(-late)
        update_of(self.opt)(params, grads, states, step=self.number(step), hyper=hyper, **more)
        foreach_zero_(carried)
