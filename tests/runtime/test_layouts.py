"""Batches of tensors that are not strided: sparse and jagged ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs


class Net(nn.Module):
    """Two matrices, the first of which a sparse one multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        out: Tensor = self.head(self.mix(x, self.table)).square().mean()
        return out


class Mix(nn.Module):
    """A product with a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Rows."""
        return torch.sparse.mm(x, table) * self.scale


def sparse() -> Tensor:
    """A matrix with few elements."""
    return torch.tensor([[0.0, 2.0, 0, 0, 0], [1.0, 0, 0, 0, 3.0], [0, 0, 0, 0, 0]]).to_sparse()


def jagged() -> Tensor:
    """Rows of two lengths."""
    return torch.nested.nested_tensor([torch.ones(2, 4), 2 * torch.ones(3, 4)], layout=torch.jagged)


def summed(net: Any, x: Tensor) -> Tensor:
    """The mean of what a linear map makes of the rows."""
    return torch.tanh(x.values() @ net["head"]["weight"].t()).square().mean()


@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("units", [[], ["mix"]], ids=["no unit", "a unit"])
def test_a_sparse_batch(units: list[str], compile: str | None) -> None:
    torch.manual_seed(0)
    net = Net()
    model = fs.split(net, units=units)
    check(model, lambda p, x: model.apply(p, x), lambda x: net(x), net, sparse(), compile)


def test_a_jagged_batch() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"head": nn.Linear(4, 2, bias=False)})
    plain = lambda x: summed({"head": {"weight": net["head"].weight}}, x)  # noqa: E731
    check(fs.split(net), summed, plain, net, jagged(), None)


def check(
    model: fs.Model, loss: Callable[..., Tensor], plain: Any, net: nn.Module, x: Tensor, compile: str | None
) -> None:
    """Three steps are those of PyTorch."""
    plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    opt, twin = fs.optim.sgd(0.1), torch.optim.SGD(net.parameters(), 0.1)
    state, step = fs.init_state(plan, opt, params=model.params), fs.make_train_step(loss, opt, plan, compile=compile)
    for _ in range(3):
        state, metrics = step(state, x)
        twin.zero_grad()
        want = plain(x)
        want.backward()
        twin.step()
        torch.testing.assert_close(metrics.loss, want.detach())
