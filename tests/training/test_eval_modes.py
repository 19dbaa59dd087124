"""An evaluation whose model still drops out says so: ``module.eval()`` after the split does not reach the model."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs


class Dropped(nn.Module):
    """Leaves rows out, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, features) in and out."""
        return x * x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(0.5) if self.training else x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "stochastic depth": Dropped,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
}


def told(layer: str, units: tuple[str, ...], train: bool = False, reads: bool = False, **options: Any) -> list[str]:
    """The warnings of an evaluation, or of a train step."""
    net = nn.Sequential(nn.Linear(4, 4), LAYERS[layer](), nn.Linear(4, 1))
    model = fs.split(net, units=units)
    net.eval()
    plan, opt = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))]), fs.optim.sgd(0.1)

    def loss(params: Any, x: Tensor) -> Tensor:
        x = x * 2 if reads and float(x.sum()) > 1e9 else x
        return model.apply(params, x, **options).square().mean()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        state, x = fs.init_state(plan, opt, params=model.params), torch.ones(3, 2, 4)
        (fs.make_train_step(loss, opt, plan) if train else fs.make_eval_step(loss, plan))(state, x)
    return [str(one.message) for one in found if "masks" in str(one.message)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("reads", [False, True], ids=["traced", "on demand"])
@pytest.mark.parametrize("units", [("1",), ()], ids=["in a unit", "outside of units"])
@pytest.mark.parametrize("layer", LAYERS)
def test_an_evaluation_with_dropout_says_so(layer: str, units: tuple[str, ...], reads: bool) -> None:
    (found,) = told(layer, units, reads=reads)
    assert "module.eval() later does not reach it: call model.apply(..., training=False)" in found
    assert not told(layer, units, reads=reads, training=False) and not told(layer, units, train=True)
