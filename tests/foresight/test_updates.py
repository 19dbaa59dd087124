"""Updates take the time of what they read, write and multiply, also where nothing was measured."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.foresight.foresee import foresee, task_of
from fshard.foresight.hardware import Hardware
from fshard.runtime.engine.activations import Activations
from fshard.schedule.candidates import Task

WIDTH = 64
SHARD = WIDTH * WIDTH * 4  # bytes of a whole leaf
BATCH = torch.empty(8, WIDTH, device="meta")


@fs.unit
def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for each in params.values():
        x = layer(each, x)
    return x.square().mean()


def made(opt: Any, ranks: int = 2, **rule: Any) -> tuple[Any, Task]:
    """A step of two layers on some ranks, and its task."""
    params = {f"l{i}": {"w": torch.empty(WIDTH, WIDTH, device="meta")} for i in range(2)}
    mesh = fs.abstract_mesh((ranks,), ("data",))
    rules = [fs.Rule(".*", fs.fsdp("data"), **rule)]
    plan = fs.make_plan(params, mesh, rules, batch=fs.P("data"), units=("*",))
    step = fs.make_train_step(loss_fn, opt, plan)
    return step, task_of(step, step.trace(BATCH), plan)


def updates(costs: fs.sim.Costs) -> dict[str, float]:
    """The seconds of updates, by group."""
    return {target: seconds for (kind, target), seconds in costs.seconds.items() if kind == "update"}


@pytest.mark.parametrize(
    ("opt", "least", "most"),
    [
        (fs.optim.sgd(0.1), 3, 4),  # parameters and gradients are read, parameters written; fused ones may scale both
        (fs.optim.sgd(0.1, momentum=0.9), 5, 6),
        (fs.optim.adamw(1e-3), 7, 8),
    ],
)
def test_an_update_moves_what_its_rule_reads_and_writes(opt: Any, least: int, most: int) -> None:
    step, task = made(opt)
    assert set(task.updates) == {"l0", "l1"}
    for need in task.updates.values():
        assert least * SHARD / 2 <= need.moved <= most * SHARD / 2 + 64
    hardware = fs.sim.hardware("h100")
    found = updates(hardware.of(task, step.plan))
    assert found == {name: hardware.speed.seconds(need) for name, need in task.updates.items()}


def test_more_ranks_update_less_each() -> None:
    two, four = (made(fs.optim.adamw(1e-3), ranks)[1].updates["l0"].moved for ranks in (2, 4))
    assert two == pytest.approx(2 * four, rel=1e-3)


def test_products_of_muon_count() -> None:
    _, task = made(fs.optim.muon(1e-3), align="leaf")
    assert task.updates["l0"].flops > 10 * 2 * WIDTH**3


def test_updates_on_the_host_take_nothing_of_the_device() -> None:
    host = {"memory_kind": "unpinned_host"}
    step, task = made(fs.optim.adamw(1e-3), **host)
    assert not task.updates and not updates(fs.sim.hardware("h100").of(task, step.plan))
    assert made(fs.optim.adamw(1e-3), update_on="device", **host)[1].updates


def test_measured_updates_stay_as_they_were_measured() -> None:
    step, task = made(fs.optim.adamw(1e-3))
    seconds = {("forward", ""): 1.0, ("backward", ""): 2.0, ("update", ""): 0.5}
    given = fs.sim.hardware("h100", costs=fs.sim.Costs(seconds))
    assert updates(given.of(task, step.plan)) == {"": 0.5}


def test_a_step_and_its_scaling_are_foreseen_with_updates() -> None:
    step, task = made(fs.optim.adamw(1e-3), ranks=4)
    hardware = fs.sim.hardware("h100")
    seen = foresee(step, BATCH, hardware)
    assert seen.simulation.compute > sum(seconds_without_updates(hardware, task, step).values())
    assert seen.scaling[4] == pytest.approx(seen.simulation.seconds)
    found = updates(hardware.of(made(fs.optim.adamw(1e-3), ranks=1)[1], made(fs.optim.adamw(1e-3), ranks=1)[0].plan))
    assert seen.scaling[1] >= sum(found.values())  # one rank updates everything


def seconds_without_updates(hardware: Hardware, task: Task, step: Any) -> dict[tuple[str, str], float]:
    """What the other ops take."""
    return {op: each for op, each in hardware.of(task, step.plan).seconds.items() if op[0] != "update"}


def test_operators_that_make_nothing_move_nothing() -> None:
    """Asking a tensor for its device is an operator, too, on tensors without data."""
    watch, x = Activations([]), torch.ones(1000)
    with watch:
        torch.ops.prim.device(x)
        assert watch.take().moved == 0
        x.add_(1.0)
        assert watch.take().moved == 8000
        torch._foreach_add_([x], 1.0)
        assert watch.take().moved == 8000
