"""Modules without memory for their parameters, and with buffers."""

import threading

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import tree
from fshard.errors import UnitError


class Turning(nn.Module):
    """Has a table that is computed when it is made, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0).cos(), persistent=False)
        self.first, self.second, self.nothing = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.nothing.weight.mark = "kept"  # type: ignore[attr-defined]
        self.register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reads the table."""
        return self.second(self.first(x * self.angles))


def test_parameters_are_empty_and_buffers_are_not() -> None:
    with fs.empty_weights():
        module = Turning()
        lazy = nn.LazyLinear(3)
    assert {leaf.device.type for leaf in module.parameters()} == {"meta"}
    assert torch.equal(module.angles, torch.arange(4.0).cos())
    assert module.second.weight is module.first.weight and module.none is None
    assert not module.first.bias.requires_grad and module.first.weight.requires_grad
    assert nn.parameter.is_lazy(lazy.weight)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_it_ends_with_an_error_and_leaves_other_threads_alone() -> None:
    made: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), fs.empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert made[0].weight.device.type == "cpu" and nn.Linear(2, 2).weight.device.type == "cpu"


def test_such_a_module_trains() -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    with fs.empty_weights():
        model = fs.split(Turning(), units=("first",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda params, x: model.apply(params, x).square().mean(), opt, plan)
    assert step(fs.init_state(plan, opt), torch.ones(2, 4))[1].loss.isfinite()


def test_buffers_without_values_are_refused() -> None:
    with torch.device("meta"):
        module = Turning()
    model = fs.split(module, units=("first",))
    params = tree.map(lambda leaf: torch.ones(leaf.shape), model.params)
    with pytest.raises(UnitError, match=r"hold no values:\n  angles\nMake the module under fs\.empty_weights\(\)"):
        model.apply(params, torch.ones(2, 4))
    out, _ = model.apply(params, torch.ones(2, 4), buffers={"angles": torch.ones(4)})
    assert out.shape == (2, 4)
    assert model.apply(model.params, torch.ones(2, 4, device="meta")).device.type == "meta"
