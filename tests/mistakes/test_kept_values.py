"""Losses that keep tensors from one call to the next: what a trace leaves there is noticed, and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs

Kept = Callable[[list[Tensor], Tensor], Tensor]


def mean(kept: list[Tensor], loss: Tensor) -> Tensor:
    """A loss in units of its running mean."""
    kept[:] = [0.9 * kept[-1] + 0.1 * loss.detach() if kept else loss.detach()]
    return loss / (1 + kept[0])


def hidden(kept: list[Tensor], loss: Tensor) -> Tensor:
    """One with a part of the step before, whose graph is gone."""
    before = kept[-1] if kept else torch.zeros(())
    kept[:] = [loss]
    return loss + 0.1 * before


def decided(kept: list[Tensor], loss: Tensor) -> Tensor:
    """One that asks for the value of what was kept."""
    kept.append(loss.detach())
    return loss * 2 if kept[0] > 1 else loss


def later(kept: list[Tensor], loss: Tensor) -> Tensor:
    """One that keeps graphs of real tensors alone."""
    before = kept[-1] if kept else torch.zeros(())
    kept[:] = [loss] if type(loss) is Tensor else []
    return loss + 0.1 * before


def step_of(keep: Kept, evaluation: bool = False, **options: Any) -> tuple[Any, fs.TrainState]:
    """A step of a loss that keeps something, and a state."""
    model, kept = fs.split(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), units=("0", "2")), list[Tensor]()
    plan, opt = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))]), fs.optim.sgd(0.1)

    def loss(params: Any, x: Tensor) -> Tensor:
        return keep(kept, model.apply(params, x).square().mean())

    made = fs.make_eval_step(loss, plan) if evaluation else fs.make_train_step(loss, opt, plan, donate=False, **options)
    return made, fs.init_state(plan, opt, params=model.params)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("options", [{}, {"compile": "fx"}, {"remat": "all"}, {"evaluation": True}], ids=str)
@pytest.mark.parametrize("keep", [mean, hidden], ids=lambda keep: keep.__name__)
def test_what_a_trace_has_left_is_named(keep: Kept, options: dict[str, Any]) -> None:
    step, state = step_of(keep, **options)
    with pytest.raises(fs.errors.LossError, match="reads what its trace, a run on tensors without data, has left"):
        step(state, torch.ones(2, 4))


def test_so_it_is_where_its_value_is_asked_for() -> None:
    step, state = step_of(decided)
    with pytest.raises(fs.errors.LossError, match="reads what its trace, a run on tensors without data, has left"):
        step(state, torch.ones(2, 4))


@pytest.mark.parametrize("options", [{}, {"compile": "fx"}, {"remat": "all"}], ids=str)
def test_a_graph_of_an_earlier_step_is_named(options: dict[str, Any]) -> None:
    step, state = step_of(later, **options)
    state, _ = step(state, torch.ones(2, 4))
    with pytest.raises(fs.errors.LossError, match="graph has been freed: .* detach what is kept from an earlier step"):
        step(state, torch.ones(2, 4))
