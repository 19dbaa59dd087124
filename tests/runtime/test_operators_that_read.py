"""Operators in a unit that read a tensor's values, which tensors of a trace do not have."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs


class Cut(nn.Module):
    """A layer whose outputs are cut where a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of one part, and of the squares of the other."""
        one, other = torch.tensor_split(self.layer(x), torch.tensor([1]), dim=-1)
        return one.sum() + other.square().sum()


@pytest.mark.parametrize("options", [{}, {"compile": "fx"}], ids=str)
def test_where_a_tensor_cuts(options: dict[str, Any]) -> None:
    module = nn.Sequential(Cut()).double()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    own = [one.detach().clone() for one in module.parameters()]
    mesh = fs.virtual_mesh((2,), ("data",))
    model = fs.split(module)
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), units=["0"])
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda params, x: model.apply(params, x) / len(x), opt, plan, **options)
    for _ in range(2):
        weights = [one.requires_grad_() for one in own]
        loss = torch.func.functional_call(
            module, dict(zip(["0.layer.weight", "0.layer.bias"], weights, strict=True)), (x,)
        )
        grads = torch.autograd.grad(loss / 4, weights)
        own = [(one - 0.1 * grad).detach() for one, grad in zip(weights, grads, strict=True)]
        state, metrics = step(state, x)
        assert metrics.loss.item() == pytest.approx(loss.item() / 4, abs=1e-12)
