"""Modules that convert modules while they run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import UnitError


class Router(nn.Module):
    """Casts its head to its own dtype at every call, as routers of transformers do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False))

    def forward(self, x: Tensor) -> Tensor:
        """In its dtype."""
        self.head = self.head.to(self.dtype)
        return torch.tanh(self.head(x.to(self.dtype)))


def net(*dtypes: torch.dtype) -> nn.Module:
    """Routers in a row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*map(Router, dtypes))


def step_of(model: fs.Model, **options: Any) -> tuple[Any, Any]:
    """A step that trains it, and its state."""
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(0.1)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = model.apply(params, x)
        return out.square().mean()

    return fs.make_train_step(loss_fn, opt, plan, **options), fs.init_state(plan, opt, params=model.params)


@pytest.mark.parametrize("units", [(), ("*",)])
@pytest.mark.parametrize("options", [{}, {"compile": "fx"}, {"remat": "all"}])
def test_converting_to_what_is_there_changes_nothing(units: tuple[str, ...], options: dict[str, Any]) -> None:
    module, x = net(torch.float32, torch.float32), torch.randn(6, 4)
    step, state = step_of(fs.split(module, units=units), **options)
    for _ in range(2):
        want = module(x).square().mean()
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics.loss, want.detach())
        grads = torch.autograd.grad(want, list(module.parameters()))
        for leaf, grad in zip(module.parameters(), grads, strict=True):
            leaf.data -= 0.1 * grad


@pytest.mark.parametrize("units", [(), ("*",)])
def test_converting_to_something_else_is_refused_and_writes_nothing(units: tuple[str, ...]) -> None:
    module, x = net(torch.float32, torch.float64), torch.randn(6, 4)
    model = fs.split(module, units=units)
    says = r"converts the parameter weight of a Linear from torch.float32 on cpu to torch.float64 on cpu"
    with pytest.raises(UnitError, match=says):
        model.apply(model.params, x)
    step, state = step_of(model)
    with pytest.raises(UnitError, match=says):
        step(state, x)
    assert {leaf.dtype for leaf in module.parameters()} == {torch.float32}


def test_other_buffers_and_dtypes_are_the_call_s_own() -> None:
    class Counter(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.to(x.dtype)
            return x * self.seen

    model = fs.split(Counter())
    out, new = model.apply(model.params, torch.ones(2, dtype=torch.float64), buffers=model.buffers)
    assert out.dtype == new["seen"].dtype == torch.float64
    assert model.buffers["seen"].dtype == torch.float32
