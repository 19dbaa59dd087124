"""Classes of ``torch.optim.Optimizer`` as people write them: right under ``from_torch``, or refused for a reason."""

import math
from typing import Any

import torch
from torch import Tensor


class Written(torch.optim.Optimizer):
    """A class whose rule is a function of one parameter, its gradient, its group and its state."""

    extra: dict[str, Any] = {}

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **self.extra, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.rule(param, param.grad, group, self.state[param])

    def begin(self) -> None:
        """Before an update."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Update one parameter."""
        raise NotImplementedError


class GroupCounter(Written):
    """SGD with lr / step, counted in the group."""

    extra = {"step": 0}

    def begin(self) -> None:
        self.param_groups[0]["step"] += 1

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] / group["step"])


class OwnCounter(Written):
    """SGD with lr / step, counted on the object."""

    updates = 0

    def begin(self) -> None:
        self.updates += 1

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] / self.updates)


class StateCounter(Written):
    """SGD with lr / step, counted in the state of each parameter, as an int, from 0."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["k"] = state.get("k", 3) + 2
        param.sub_(grad, alpha=group["lr"] / len(range(state["step"])) + 1e-3 / state["k"])


class OwnLion(Written):
    """Lion with decoupled decay."""

    extra = {"weight_decay": 0.1}

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(state["exp_avg"].lerp(grad, 0.1).sign_(), alpha=group["lr"])
        state["exp_avg"].lerp_(grad, 0.01)


class AdaBelief(Written):
    """AdaBelief, with products of betas as floats in the state."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(param), s=torch.zeros_like(param), b1=1.0, b2=1.0)
        state["b1"] *= 0.9
        state["b2"] *= 0.999
        state["m"].lerp_(grad, 0.1)
        state["s"].mul_(0.999).addcmul_(grad - state["m"], grad - state["m"], value=0.001).add_(1e-12)
        size = (state["s"] / (1 - state["b2"])).sqrt_().add_(1e-8)
        param.addcdiv_(state["m"] / (1 - state["b1"]), size, value=-group["lr"])


class Lamb(Written):
    """LAMB: a trust ratio for each parameter."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(param), v=torch.zeros_like(param))
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad * grad, 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6)
        param.sub_(update, alpha=group["lr"] * float(param.norm() / update.norm()))


class RowsAndColumns(Written):
    """Second moments of rows and columns, as Adafactor has."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        square = grad * grad + 1e-12
        if grad.ndim > 1:
            if not state:
                state.update(row=torch.zeros_like(square.mean(-1)), col=torch.zeros_like(square.mean(-2)))
            state["row"].lerp_(square.mean(-1), 0.1)
            state["col"].lerp_(square.mean(-2), 0.1)
            mean = state["row"].mean(-1, keepdim=True).unsqueeze(-1)
            square = state["row"].unsqueeze(-1) * state["col"].unsqueeze(-2) / mean
        param.addcdiv_(grad, square.sqrt(), value=-group["lr"])


class Centralised(Written):
    """Gradient centralisation: matrices lose the mean of each row of their gradient."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if grad.ndim > 1:
            grad = grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)
        param.sub_(grad, alpha=group["lr"])


class ScheduleFree(Written):
    """Schedule-free SGD: a point, its average, and the weights of the average as a float."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(z=param.clone(), total=0.0)
        weight = group["lr"] ** 2
        state["total"] += weight
        average = (param - 0.1 * state["z"]) / 0.9
        state["z"].sub_(grad, alpha=group["lr"])
        average.lerp_(state["z"], weight / state["total"])
        param.copy_(0.9 * average + 0.1 * state["z"])


class SecondStep(Written):
    """A buffer that appears at the second step: the change of the gradient."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 1:
            state["change"] = 0.5 * state["change"] + grad if "change" in state else grad.clone()
            grad = grad + 0.1 * state["change"]
        param.sub_(grad, alpha=group["lr"])


class ByDims(Written):
    """Another rate for vectors."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] * (0.1 if param.ndim < 2 else 1.0))


class Convolutions(Written):
    """Another rate for tensors of four dims."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] * (0.1 if param.ndim == 4 else 1.0))


class GlobalNorm(Written):
    """A step of unit length over all parameters."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = math.sqrt(sum(float(each.grad.square().sum()) for each in group["params"]))
        param.sub_(grad, alpha=group["lr"] / total)


class Noisy(Written):
    """Langevin dynamics."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class SharedState(Written):
    """A count under a key that is no parameter."""

    def begin(self) -> None:
        self.state["all"] = {"step": self.state["all"].get("step", 0) + 1}  # type: ignore[index]

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] / self.state["all"]["step"])  # type: ignore[index]


class WideNumber(Written):
    """A product in the parameter's dtype, beside a moment in float32 at least."""

    def rule(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        wide = torch.promote_types(param.dtype, torch.float32)
        if not state:
            state.update(product=torch.ones((), dtype=param.dtype), m=torch.zeros_like(param, dtype=wide))
        state["product"] = state["product"] * 0.97
        state["m"].lerp_(grad.to(wide), 0.1)
        param.sub_((state["m"] * float(state["product"])).to(param.dtype), alpha=group["lr"])


RIGHT = (StateCounter, OwnLion, AdaBelief, ScheduleFree, SecondStep, WideNumber)
"""Classes that run as they are."""

REFUSED = {
    GroupCounter: r'param_groups\[0\]\["step"\]',
    OwnCounter: r"self\.updates",
    SharedState: r"state\['all'\]",
    Lamb: "cut into halves",
    RowsAndColumns: r"shape \[4, 6\], flattened",
    Centralised: r"shape \[4, 6\], flattened",
    ByDims: r"shape \[4, 6\], flattened",
    Convolutions: r"shape \[2, 3, 2, 2\], flattened",
    GlobalNorm: "cut into halves",
    Noisy: "it draws random numbers",
}
"""Classes that cannot run on shards, and what the error says of them."""
