"""``fs.func.differentiable``: an optimizer as a pure function of trees, to take gradients through."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.errors import PlanError, TreeError
from fshard.optim.adamw import adamw
from fshard.optim.base import Optimizer, rate
from fshard.optim.sgd import sgd
from fshard.sharding.plan import Plan

State = dict[str, Any]


@dataclass(frozen=True)
class Differentiable:
    """``update(params, grads, state) -> (params, state)``. Made by ``fs.func.differentiable``."""

    opt: sgd | adamw
    plan: Plan

    def init(self, params: Any) -> State:
        """The optimizer's state before the first update: the number of updates, and its buffers by name."""
        trees: dict[str, dict[str, Tensor]] = {}
        for path, leaf in self.plan.check_tree(params, whole=False).items():
            if self.plan.leaves[path].trainable:
                for name, buffer in self.opt.init(leaf.detach()).items():
                    trees.setdefault(name, {})[path] = buffer
        return {"step": 0, **{name: tree.nest(flat) for name, flat in trees.items()}}

    def __call__(self, params: Any, grads: Any, state: State) -> tuple[dict[str, Any], State]:
        """One update, differentiable, that writes to no tensor.

        Args:
            params: a tree of shards.
            grads: their gradients, a tree like ``params``; frozen leaves stay as they are.
            state: what ``init`` or the update before returned.

        Returns:
            The next parameters and the next state.

        Raises:
            TreeError: trees or state that do not fit the plan.
            PlanError: an optimizer without a differentiable form.
        """
        flat = self.plan.check_tree(params, whole=False)
        slopes = self.plan.check_tree(grads, whole=False, what="grads")
        names = [name for name in state if name != "step"]
        if names != list(self.opt.init(torch.empty(0, device="cpu"))):
            raise TreeError(f"the state holds {names} for {self.opt!r}: make it with .init(params)")
        buffers = {name: dict(tree.paths(state[name])) for name in names}
        for path, leaf in self.plan.leaves.items():
            if leaf.trainable:
                own = {name: buffers[name][path] for name in names}
                hyper = self.opt.hyper(path, leaf.shape)
                flat[path], new = _updated(self.opt, flat[path], slopes[path], own, state["step"] + 1, hyper)
                for name in names:
                    buffers[name][path] = new[name]
        return tree.nest(flat), {"step": state["step"] + 1, **{name: tree.nest(buffers[name]) for name in names}}


def differentiable(opt: Optimizer, plan: Plan) -> Differentiable:
    """An optimizer as a pure function, for gradients through its updates (MAML; Finn, Abbeel and Levine, 2017).

    Its updates equal the train step's fused ones up to rounding. They are slower, since they use ordinary operators,
    and keep their intermediate values.

    Args:
        opt: ``fs.optim.sgd(...)`` or ``fs.optim.adamw(...)``.
        plan: the plan.

    Raises:
        PlanError: another optimizer.

    >>> params = {"w": torch.ones(2)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> update = fs.func.differentiable(fs.optim.sgd(0.5), plan)
    >>> params, state = update(params, {"w": torch.ones(2)}, update.init(params))
    >>> params["w"], state["step"]
    (tensor([0.5000, 0.5000]), 1)
    """
    expect("differentiable(opt, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    if not isinstance(opt, sgd | adamw):
        raise PlanError(f"{opt!r} has no differentiable form: use fs.optim.sgd or fs.optim.adamw")
    return Differentiable(opt, plan)


def _updated(
    opt: sgd | adamw, param: Tensor, grad: Tensor, state: State, step: int, hyper: float
) -> tuple[Tensor, State]:
    """A leaf and its buffers after update number ``step``: as ``opt.update`` up to rounding, but new tensors."""
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
