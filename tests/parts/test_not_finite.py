"""Losses and gradients that are not finite: their address, and how many in a row are skipped."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import NonFiniteError, PlanError

OPT = fs.optim.sgd(0.1)
WAYS = ("train", "train skip=", "step", "read in the step", "apart", "parts")


def loss(p: Any, x: Tensor) -> Tensor:
    """Of two leaves, of which the rows reach the gradient of the first alone."""
    return (p["a"] * x).mean() + p["b"].sum()


def stepped(way: str, plan: fs.Plan, skip_norm: float | None = None, limit: int = 10) -> Any:
    """A step of a kind: ``(state, rows) -> (state, whether it was skipped)``."""
    options: dict[str, Any] = {"skip_limit": limit}
    if way.startswith("train"):
        skip = (lambda metrics: False) if way == "train skip=" and skip_norm else None
        step = fs.make_train_step(loss, OPT, plan, skip=skip, skip_norm=None if skip else skip_norm, **options)
        return step
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan, skip_norm=skip_norm, **options)

    def fn(state: Any, x: Tensor) -> Any:
        value, grads = grad(state, x)
        if way == "apart" and value.item() == 123.0:
            raise AssertionError
        state, metrics = update(state, grads)
        if way == "read in the step":
            state = state.replace(params=fs.tree.scale(state.params, 1.0))
        return state, metrics

    return fn if way == "parts" else fs.make_step(fn, plan)


def ranks_of(world: int) -> tuple[Any, fs.Plan, dict[str, Tensor]]:
    """A mesh, a plan on it, and parameters."""
    mesh = fs.virtual_mesh((world,), ("data",))
    params = {"a": torch.ones(4), "b": torch.ones(4)}
    return mesh, fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data")), params


@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("world", [1, 2])
def test_the_error_has_an_address(world: int) -> None:
    for way in WAYS:
        mesh, plan, params = ranks_of(world)

        def main(way: str = way, mesh: Any = mesh, plan: fs.Plan = plan, params: Any = params) -> str:
            step, state = stepped(way, plan), fs.init_state(plan, OPT, params=params)
            state, _ = step(state, torch.ones(1, 4))
            before = fs.unshard(fs.settle(state).params, plan)
            with pytest.raises(NonFiniteError) as caught:
                step(state, torch.full((1, 4), math.nan if mesh.rank == world - 1 else 1.0))
            assert state.step == 1 and torch.equal(fs.unshard(fs.settle(state).params, plan)["a"], before["a"])
            return str(caught.value)

        for rank, said in enumerate(mesh.run(main)):
            assert "step 2" in said and "of b" not in said, (way, said)
            if way != "read in the step" or not rank:  # where each rank knows its own part alone: rank 0 holds all of a
                assert "rank 0" in said and "of a, of unit root" in said, (way, said)
            if way == "step":
                assert f"rank {world - 1} has the loss nan" in said


@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_so_many_in_a_row_are_skipped() -> None:
    for way in [way for way in WAYS if way != "read in the step"]:
        mesh, plan, params = ranks_of(2)

        def main(way: str = way, mesh: Any = mesh, plan: fs.Plan = plan, params: Any = params) -> Any:
            step, state = stepped(way, plan, 1e3, 2), fs.init_state(plan, OPT, params=params)
            good, bad = torch.ones(1, 4), torch.full((1, 4), math.inf if mesh.rank else 1.0)
            told = []
            for rows in (bad, bad, good, bad, bad):
                state, metrics = step(state, rows)
                told.append(bool(metrics.skipped))
            with pytest.raises(NonFiniteError, match=r"2 before it were not finite, and were skipped: skip_limit=2"):
                step(state, bad)
            return told, fs.unshard(fs.settle(state).params, plan)

        for told, after in mesh.run(main):
            assert told == [True, True, False, True, True], way
            torch.testing.assert_close(after["a"], torch.full((4,), 1 - 0.1 / 4))
            torch.testing.assert_close(after["b"], torch.full((4,), 0.9))


def test_limits_are_checked() -> None:
    _, plan, _ = ranks_of(1)
    for limit in (-1, True, 1.5):
        with pytest.raises(PlanError, match="skip_limit"):
            fs.make_update(OPT, plan, skip_norm=1.0, skip_limit=limit)  # type: ignore[arg-type]
