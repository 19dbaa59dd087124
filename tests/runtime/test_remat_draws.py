"""Units that draw random numbers outside of torch's generator, and are computed again in their backward."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fshard as fs

OWN = torch.Generator().manual_seed(3)
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - the generator that programs share
}


class Noisy(nn.Module):
    """A layer whose gradient depends on what it draws."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 4), nn.Linear(4, 1), draw

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4) in, (rows, 1) out."""
        return self.second(torch.tanh(self.first(x) + 3 * self.draw()))


def trained(draw: Callable[[], Any], values: bool = False, **options: Any) -> Tensor:
    """The parameters after two steps, in each of which the forward draws the same numbers."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(Noisy(draw)), units=("0",))
    plan, opt = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))]), fs.optim.sgd(0.1)

    def loss(params: Any, x: Tensor) -> Tensor:
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        x = x * 2 if values and float(x.sum()) > 1e9 else x
        return model.apply(params, x).square().mean()

    step, state = fs.make_train_step(loss, opt, plan, **options), fs.init_state(plan, opt, params=model.params)
    for _ in range(2):
        state, _ = step(state, torch.linspace(-1, 1, 24).view(6, 4))
    return torch.cat([leaf.flatten() for leaf in fs.tree.leaves(state.params)])


@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("name", DRAWS)
def test_they_draw_the_same_numbers_again(name: str, compile: str | None) -> None:
    assert torch.equal(trained(DRAWS[name], remat="all", compile=compile), trained(DRAWS[name]))


@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("values", [False, True], ids=["traced", "on demand"])
def test_generators_of_their_own_are_refused(values: bool, compile: str | None) -> None:
    def draw() -> Tensor:
        return torch.rand((), generator=OWN)

    trained(draw, values, compile=compile)
    with pytest.raises(fs.errors.PlanError, match=r"unit 0 draws from a torch\.Generator of its own"):
        trained(draw, values, remat="all", compile=compile)
