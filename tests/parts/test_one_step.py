"""What takes a train step will take a step function, once both run by one protocol. Until then it says what to do."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError

PLAYED = fs.virtual_mesh((2,), ("data",))
BATCH = torch.ones(4)


@pytest.fixture
def made() -> tuple[Any, Any]:
    """A step function, and a state."""
    params = {"w": torch.ones(4)}
    plan, opt = fs.make_plan(params, PLAYED, [(".*", fs.fsdp("data"))]), fs.optim.sgd(0.1)
    grad = fs.value_and_grad(lambda params, x: (params["w"] * x.mean()).sum(), plan)
    update = fs.make_update(opt, plan)

    def both(state: Any, batch: Any) -> Any:
        loss, grads = grad(state.params, batch)
        return update(state, grads)[0], loss

    return fs.make_step(both, plan), fs.init_state(plan, opt, params=params)


def test_a_trace_of_a_step_function_works_outside_of_mesh_run(made: Any) -> None:
    step, state = made
    assert [op.kind for op in step.trace(state, BATCH).schedule.ops].count("all_gather") == 1


@pytest.mark.xfail(strict=True, raises=PlanError, reason="step functions have a protocol of their own")
def test_verify_takes_a_step_function(made: Any) -> None:
    step, state = made
    assert "equal" in str(fs.verify(step, state, BATCH))


@pytest.mark.xfail(strict=True, raises=PlanError, reason="step functions have a protocol of their own")
def test_a_step_function_is_stepped_through(made: Any) -> None:
    step, state = made
    fs.view.step_through(step, state, BATCH).finish()


def test_errors_say_what_to_do_until_then(made: Any) -> None:
    step, state = made
    with pytest.raises(PlanError, match="of a step function, a train step of its loss"):
        fs.verify(step, state, BATCH)
    with pytest.raises(PlanError, match="a train step of its loss, or a part of it"):
        fs.view.step_through(step, state, BATCH)
