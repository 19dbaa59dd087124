"""Units that get parameters of other owners among their arguments, and units without an element of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import UnitError
from tests.shared.workers import Pools

RULES = [(".*", fs.fsdp("shard"))]
WAYS: dict[str, dict[str, Any]] = {"eager": {}, "fx": {"compile": "fx"}, "remat": {"remat": "all"}}


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.linear(x) * w.sum() + x * w + w.mul(2).mean() + self.none.sum()


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.none.sum()


class Net(nn.Module):
    """``ask`` makes it depend on a value, so that its first step gathers on demand."""

    def __init__(self, ask: bool) -> None:
        super().__init__()
        self.table, self.ask = nn.Embedding(4, 4), ask
        self.blocks, self.empty = nn.ModuleList(Uses() for _ in range(2)), Empty()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x, self.table.weight))
            x = self.blocks[1 - i](x, block.linear.weight)
            if self.ask and float(x.detach().sum()) > 1e9:
                break
        return self.empty(x).square().mean()


def check(ask: bool, way: str) -> None:
    torch.manual_seed(0)
    net = Net(ask)
    model = fs.split(net, ("blocks.*", "empty"))
    opt = fs.optim.sgd(0.01)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), RULES, batch=fs.P("shard"))
    step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan, **WAYS[way])
    state = fs.init_state(plan, opt, params=model.params)
    sgd, x = torch.optim.SGD(net.parameters(), 0.01), torch.randn(4, 4)
    for _ in range(3):
        state, metrics = step(state, x)
        sgd.zero_grad()
        loss = net(x)
        loss.backward()
        torch.testing.assert_close(metrics.loss, loss.detach())
        sgd.step()
    expected = dict(net.named_parameters())
    for path, leaf in tree.paths(fs.unshard(state.params, plan)):
        torch.testing.assert_close(leaf, expected[path].detach())


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ask", [False, True], ids=["traced", "on demand"])
def test_parameters_of_others_are_arguments_like_any(ask: bool, way: str, pool: Pools) -> None:
    check(ask, way)
    if way == "eager":
        pool(2).run(check, ask, way)


@pytest.mark.parametrize("ask", [False, True], ids=["traced", "on demand"])
def test_a_parameter_that_comes_by_a_closure_is_named(ask: bool) -> None:
    @fs.unit
    def closes(p: Any, x: Tensor) -> Tensor:
        return x * p["w"] + given["other"].sum() * given["other"].mul(2).sum()

    given: dict[str, Tensor] = {}

    def loss(params: Any, x: Tensor) -> Tensor:
        given["other"] = params["b"]["w"]
        y = closes(params["a"], x).sum()
        return y * 2 if ask and float(y.detach()) > 1e9 else y

    params = {"a": {"w": torch.ones(4)}, "b": {"w": torch.ones(4)}}
    plan = fs.make_plan(params, fs.make_mesh((-1,), ("shard",)), RULES, units=("a", "b"))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(loss, opt, plan)
    with pytest.raises(UnitError, match="reads the parameter b.w, which it was not given"):
        step(fs.init_state(plan, opt, params=params), torch.ones(4))
