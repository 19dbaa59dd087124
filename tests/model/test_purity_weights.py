"""Modules that hold their parameters once more, in attributes: recurrent ones, and what a call sets to a weight."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree

WAYS: dict[str, dict[str, Any]] = {"eager": {}, "fx": {"compile": "fx"}, "remat": {"remat": "all"}}


class Recurrent(nn.Module):
    """Units with recurrent modules inside, or which are such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 3, bidirectional=True, batch_first=True), nn.GRU(6, 4)])
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for layer in self.layers:
            x, _ = layer(x)
        out: Tensor = self.cells[0](x[:, 0])[0].square().mean()
        return out


class Telling(nn.Module):
    """Leaves its weights behind, alone and in a list, with a number that depends on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """An affine map."""
        self.used = self.inner.weight
        self.all = [self.inner.weight, {"bias": self.inner.bias, "mean": x.mean()}]
        out: Tensor = self.inner(x)
        return out


class Listening(nn.Module):
    """Adds up what its blocks left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Telling(), Telling()])

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = x.square().mean()
        for layer in self.layers:
            weight, rest = layer.all
            assert weight is layer.used is layer.inner.weight
            loss = loss + layer.used.square().mean() + rest["bias"].sum() * rest["mean"]
        return loss


def check(kind: type[nn.Module], way: str, units: str) -> None:
    """On a rank: two steps are those of the plain module."""
    torch.manual_seed(0)
    module = kind().double()
    model = fs.split(module, units)
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(0.1)
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan, debug=True, **WAYS[way])
        twin = copy.deepcopy(module)
        rule = torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(2, 3, 4, dtype=torch.float64)
            state, metrics = step(state, x)
            rule.zero_grad()
            loss = twin(x)
            loss.backward()
            rule.step()
            torch.testing.assert_close(metrics.loss, loss.detach())
        for path, leaf in tree.paths(fs.unshard(state.params, plan)):
            torch.testing.assert_close(leaf, twin.get_parameter(path).detach())


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "units", "way"),
    [
        pytest.param(kind, units, way, marks=[pytest.mark.slow] * ((kind, way) == (Recurrent, "fx")))
        for kind, units in ((Recurrent, "*.*"), (Listening, "layers.*"))
        for way in WAYS
    ],
)
def test_steps_are_those_of_the_plain_module(kind: type[nn.Module], units: str, way: str) -> None:
    fs.virtual_mesh((2,), ("shard",)).run(check, kind, way, units)


def test_a_weight_left_behind_is_that_of_the_call() -> None:
    module = Listening()
    model = fs.split(module, "layers.*")
    x = torch.randn(2, 4)
    torch.testing.assert_close(model.apply(model.params, x), copy.deepcopy(module)(x))
    double = tree.map(lambda leaf: 2 * leaf, model.params)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for leaf in twin.parameters():
            leaf *= 2
    torch.testing.assert_close(model.apply(double, x), twin(x))
