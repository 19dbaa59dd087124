"""Tools on a virtual mesh outside of ``run``: the state of all ranks, and the global batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs

OPT = fs.optim.sgd(0.1)


def made(loss: Any = None) -> tuple[fs.Plan, Any, Any, Tensor]:
    """A plan on two ranks, a loss, a state and a global batch."""
    params = {"w": torch.arange(4.0)}
    plan = fs.make_plan(params, fs.virtual_mesh((2,), ("data",)), [("w", fs.fsdp("data"))], batch=fs.P("data"))
    loss = loss or (lambda p, x: (p["w"] * x).square().mean())
    return plan, loss, fs.init_state(plan, OPT, params=params), torch.arange(16.0).view(4, 4)


def test_a_train_step_is_verified_from_outside() -> None:
    plan, loss, state, batch = made()
    step = fs.make_train_step(loss, OPT, plan)
    found = fs.verify(step, state, batch)
    assert "params.w" in str(found)
    inside = plan.mesh.run(lambda: str(fs.verify(step, state, plan.local_batch(batch))))  # type: ignore[attr-defined]
    assert inside == [str(found)] * 2
    state, metrics = step(state, batch)
    assert metrics.loss == (torch.arange(4.0) * batch).square().mean()


def test_a_train_step_that_is_wrong_is_found_from_outside() -> None:
    kept: list[Tensor] = []

    def impure(p: Any, x: Tensor) -> Tensor:
        kept.append(x)
        return (p["w"] * x).sum() * len(kept)

    plan, loss, state, batch = made(impure)
    with pytest.raises(fs.VerifyError, match="loss"):
        fs.verify(fs.make_train_step(loss, OPT, plan), state, batch)


def test_a_step_function_is_traced_from_outside() -> None:
    plan, loss, state, batch = made()
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)
    product = fs.func.hvp(loss, plan)

    def fn(state: Any, batch: Any) -> Any:
        _, g = grad(state, batch)
        return update(state, product(state.params, g, batch))

    step = fs.make_step(fn, plan)
    traced = step.trace(state, batch)
    step(state, batch)
    assert step.schedule == traced.schedule
