"""Gradients that count rows of the batch depend on how it is cut: a step says so."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs

TABLES: dict[str, Callable[[bool], nn.Module]] = {
    "embedding": lambda scaled: nn.Embedding(6, 4, scale_grad_by_freq=scaled),
    "bag": lambda scaled: nn.EmbeddingBag(6, 4, scale_grad_by_freq=scaled),
}
IDS = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 3]])
OPT = fs.optim.sgd(0.1)


def run(table: str, scaled: bool, way: str, units: tuple[str, ...], **options: Any) -> None:
    """On a rank: two steps."""
    model = fs.split(nn.Sequential(TABLES[table](scaled), nn.Linear(4, 1)), units=units)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    state, ids = fs.init_state(plan, OPT), plan.local_batch(IDS)

    def loss(params: Any, ids: Tensor) -> Tensor:
        out = model.apply(params, ids).square().mean()
        return out * 2 if way == "by value" and float(out.detach()) > 1e9 else out

    if way == "evaluation":
        fs.make_eval_step(loss, plan)(state, ids)
    elif way == "parts":
        grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)
        fs.make_step(lambda state, ids: update(state, grad(state, ids)[1]), plan)(state, ids)
    else:
        step = fs.make_train_step(loss, OPT, plan, **options)
        for _ in range(2):
            state, _ = step(state, ids)


def told(ranks: int, table: str, way: str, units: tuple[str, ...] = ("0",), scaled: bool = True, **options: Any) -> Any:
    """The warnings of all ranks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fs.virtual_mesh((ranks,), ("data",)).run(run, table, scaled, way, units, **options)
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("units", [("0",), ()], ids=["in a unit", "outside of units"])
@pytest.mark.parametrize("way", ["traced", "by value", "parts"])
@pytest.mark.parametrize("table", TABLES)
def test_a_step_on_several_ranks_says_so(table: str, way: str, units: tuple[str, ...]) -> None:
    found = told(2, table, way, units)
    assert len(found) == 2 and all("gradients of 0.weight by how often" in one for one in found)


@pytest.mark.parametrize("table", TABLES)
def test_so_does_one_that_cuts_microbatches(table: str) -> None:
    assert len(told(1, table, "traced", accumulate=2)) == 1


@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_said_where_nothing_is_cut(table: str) -> None:
    assert not told(1, table, "traced") and not told(2, table, "evaluation")
    assert not told(2, table, "traced", scaled=False)
