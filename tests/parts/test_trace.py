"""What a trace finds is a value: the same for train steps, evaluations, gradients and steps of parts."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PlanError
from fshard.schedule import Trace
from fshard.schedule.footprint import footprint
from tests.runtime.test_memory_measured import Peak

WIDTH, ROWS, LAYERS = 64, 2048, 4
OPT = fs.optim.sgd(0.1)


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(x @ p["w"])


def loss(p: Any, x: Tensor) -> Tensor:
    """A stack of layers, and a leaf that nothing uses."""
    for number in range(LAYERS):
        x = layer(p[str(number)], x)
    return x.square().mean()


def by_value(p: Any, x: Tensor) -> Tensor:
    """A loss that no trace finds."""
    return loss(p, x) * (1.0 if x.sum().item() > 0 else 2.0)


def weights() -> dict[str, Any]:
    """Its parameters."""
    layers: dict[str, Any] = {str(number): {"w": 0.9 * torch.eye(WIDTH)} for number in range(LAYERS)}
    return layers | {"idle": torch.ones(4)}


def plan_on(mesh: fs.Mesh) -> fs.Plan:
    """All leaves sharded."""
    return fs.make_plan(weights(), mesh, [(".*", fs.fsdp("shard"))], units=("*",), batch=fs.P("shard"))


def two_passes(plan: fs.Plan, fn: Any = loss) -> fs.types.Step:
    """A step at perturbed weights."""
    grad, update = fs.value_and_grad(fn, plan), fs.make_update(OPT, plan)

    def step(state: Any, batch: Any) -> Any:
        value, grads = grad(state, batch)
        _, grads = grad(fs.tree.add(state.params, grads, alpha=0.05), batch)
        state, _ = update(state, grads)
        return state, value

    return fs.make_step(step, plan)


RUNS: dict[str, Callable[..., Any]] = {
    "train": lambda plan, fn=loss: fs.make_train_step(fn, OPT, plan),
    "evaluation": lambda plan, fn=loss: fs.make_eval_step(fn, plan),
    "gradients": lambda plan, fn=loss: fs.value_and_grad(fn, plan),
    "parts": two_passes,
}


def traced(name: str, run: Any, plan: fs.Plan, batch: Tensor) -> Trace:
    """What a trace finds; that of a step of parts takes a state."""
    if name != "parts":
        return run.trace(batch)  # type: ignore[no-any-return]
    found: Trace = run.trace(fs.init_state(plan, OPT, params=weights()), batch)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_needs_no_processes(name: str) -> None:
    plan, batch = plan_on(fs.abstract_mesh((2,), ("shard",))), torch.ones(ROWS, WIDTH)
    found = traced(name, RUNS[name](plan), plan, batch)
    assert type(found) is Trace and str(found) == str(found.schedule)
    assert len(found.needs) == len(found.schedule.stages.computes)
    assert found.footprint == footprint(found.schedule, found.needs) and found.footprint.activation_bytes > 0
    assert found.unused == (() if name == "evaluation" else ("idle",)) and found.choice is None
    with pytest.raises(FrozenInstanceError):
        found.choice = None  # type: ignore[misc]


@pytest.mark.parametrize("name", RUNS)
def test_what_ran_is_on_the_step(name: str) -> None:
    plan, batch = plan_on(fs.make_mesh((1,), ("shard",))), torch.ones(8, WIDTH)
    run, state = RUNS[name](plan), fs.init_state(plan, OPT, params=weights())
    found = traced(name, run, plan, batch)
    for read in (lambda: run.schedule, lambda: run.measured):
        with pytest.raises(PlanError, match="no schedule yet|nothing was measured"):
            read()
    assert run.record == ()
    run(state, batch)
    assert run.schedule == found.schedule and run.record == run.schedule.ops
    assert run.measured.schedule is run.schedule and run.measured.seconds > 0


@pytest.mark.parametrize("name", [name for name in RUNS if name != "parts"])
def test_a_program_that_a_run_has_found(name: str) -> None:
    plan, batch = plan_on(fs.make_mesh((1,), ("shard",))), torch.ones(8, WIDTH)
    run = RUNS[name](plan, by_value)
    with pytest.raises(PlanError, match="run it once"):
        run.trace(batch)
    run(fs.init_state(plan, OPT, params=weights()), batch)
    with pytest.raises(PlanError, match="gathered on demand"):
        print(run.schedule)
    found = run.trace(batch)
    for read in (lambda: found.footprint, lambda: found.unused):
        with pytest.raises(PlanError, match="a run has found this program"):
            read()


def test_a_step_function_of_values_has_no_trace() -> None:
    plan = plan_on(fs.abstract_mesh((2,), ("shard",)))
    with pytest.raises(PlanError, match="runs part by part, since it asks for values"):
        traced("parts", two_passes(plan, by_value), plan, torch.ones(8, WIDTH))


def test_a_leaf_that_one_pass_uses_is_used() -> None:
    plan = plan_on(fs.abstract_mesh((2,), ("shard",)))
    grad, other = fs.value_and_grad(loss, plan), fs.value_and_grad(lambda p, x: p["idle"].sum(), plan, only="idle|0.*")
    update = fs.make_update(OPT, plan, only="[1-9].*")

    def fn(state: Any, batch: Any) -> Any:
        value, _ = other(state, batch)
        _, grads = grad(state, batch)
        return update(state, {name: grads[name] for name in "123"})[0], value

    state, batch = fs.init_state(plan, OPT, params=weights()), torch.ones(8, WIDTH)
    assert other.trace(batch).unused == ("0.w",)
    assert fs.make_step(fn, plan).trace(state, batch).unused == ()


@pytest.mark.long
def test_a_step_of_parts_holds_what_was_said() -> None:
    plan, batch = plan_on(fs.make_mesh((1,), ("shard",))), torch.ones(ROWS, WIDTH)
    step, state = two_passes(plan), fs.init_state(plan, OPT, params=weights())
    said = step.trace(state, batch).footprint.peak_bytes
    with Peak() as peak:
        step(state, batch)
    assert 0.95 * said <= peak.above <= 1.05 * said
