"""Updates take the time of what they read, write and multiply, also where nothing was measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError
from fshard.foresight.foresee import foresee, task_of
from fshard.foresight.hardware import Hardware
from fshard.foresight.packing_time import packed_need
from fshard.runtime.engine.activations import Activations
from fshard.schedule.candidates import PolicyTask
from fshard.sharding.plan import plan_of

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


def made(opt: Any, ranks: int = 2, **rule: Any) -> tuple[Any, PolicyTask]:
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
    ("opt", "shards"),
    [
        (fs.optim.sgd(0.1), 3),  # parameters and gradients are read, parameters written
        (fs.optim.sgd(0.1, momentum=0.9), 5),
        (fs.optim.adamw(1e-3), 7),
    ],
)
def test_an_update_moves_what_its_rule_reads_and_writes(opt: Any, shards: int) -> None:
    step, task = made(opt)
    assert set(task.updates) == {"l0", "l1"}
    for need in task.updates.values():
        assert shards * SHARD / 2 <= need.moved <= shards * SHARD / 2 + 64  # and counts of steps
    hardware = fs.sim.hardware("h100")
    found = updates(hardware.of(task, step.plan))
    assert found == {name: hardware.speed.seconds(need) for name, need in task.updates.items()}


def test_more_ranks_update_less_each() -> None:
    two, four = (made(fs.optim.adamw(1e-3), ranks)[1].updates["l0"].moved for ranks in (2, 4))
    assert two == pytest.approx(2 * four, rel=1e-3)


def test_products_of_muon_count() -> None:
    _, task = made(fs.optim.muon(1e-3), align="leaf")
    assert task.updates["l0"].flops > 10 * 2 * WIDTH**3


def test_updates_on_the_host_take_its_time() -> None:
    there = {"memory_kind": "unpinned_host"}
    step, task = made(fs.optim.adamw(1e-3), **there)
    need = made(fs.optim.adamw(1e-3))[1].updates["l0"]
    assert task.updates["l0"] == need  # the same operators
    for rate in (10e9, 20e9):
        found = updates(fs.sim.hardware("h100", host=rate).of(task, step.plan))
        assert found == {name: pytest.approx(need.moved / rate) for name in ("l0", "l1")}
    precision = fs.Precision(compute=torch.bfloat16)
    cast = plan_of(step.plan.source, step.plan.mesh, step.plan.batch, precision)
    assert updates(fs.sim.hardware("h100").of(task, cast))["l0"] == pytest.approx((need.moved + SHARD / 2 * 1.5) / 10e9)


@pytest.mark.parametrize(
    ("rule", "shards"),
    [
        ({"memory_kind": "unpinned_host", "update_on": "device"}, 3),
        ({"opt_memory_kind": "unpinned_host"}, 2),
        ({"opt_memory_kind": "unpinned_host", "update_on": "host"}, 1),
    ],
)
def test_what_comes_for_an_update_and_goes_takes_time(rule: dict[str, Any], shards: int) -> None:
    step, task = made(fs.optim.adamw(1e-3), **rule)
    hardware = fs.sim.hardware("h100", host=10e9)
    here = hardware.host if rule.get("update_on") == "host" else hardware.speed_for(step.plan)
    need = made(fs.optim.adamw(1e-3))[1].updates["l0"]
    copies = 2 * shards * SHARD / 2 / (0.8 * 64e9)
    found = updates(hardware.of(task, step.plan))
    assert found == {name: pytest.approx(here.seconds(need) + copies) for name in ("l0", "l1")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_beside_compute(ranks: int) -> None:
    """A shard comes before it is gathered, and a gradient goes when it is whole; the words name both rates."""
    step, task = made(fs.optim.adamw(1e-3), ranks, memory_kind="unpinned_host")
    hardware = fs.sim.hardware("h100")
    costs = hardware.of(task, step.plan)
    one = SHARD / ranks / (0.8 * 64e9)
    ops = [(kind, name) for name in ("l0", "l1") for kind in ("all_gather", "offload")]
    assert costs.copies == {op: pytest.approx(one) for op in ops}
    words = "; 47.7 GiB a second to a rank's host and from it, 9.3 GiB a second in updates there"
    assert hardware.words_for(step.plan).endswith(words)
    seen = foresee(step, BATCH, hardware)
    run = fs.sim.simulate(seen.schedule, replace(costs.only({op.kind for op in seen.schedule}), copies={}))
    assert seen.simulation.seconds > run.seconds and set(run.exposed_by_kind) < set(seen.simulation.exposed_by_kind)
    assert "a rank's host" not in hardware.words_for(made(fs.optim.adamw(1e-3))[0].plan)


BF16 = fs.Precision(compute=torch.bfloat16)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("precision", [fs.Precision(), BF16], ids=["exact", "bf16"])
def test_what_is_gathered_from_the_host_is_made_there(
    precision: fs.Precision, form: str | None, update_on: str
) -> None:
    """Once an update, wherever that runs: a cast, or the packed form, which is no cast."""
    step, _ = made(fs.optim.adamw(1e-3), memory_kind="unpinned_host", update_on=update_on)
    rules = [fs.Rule(".*", fs.fsdp("data"), memory_kind="unpinned_host", update_on=update_on, wire=fs.Wire(form))]
    plan = step.plan.replace(rules=rules, precision=precision)
    task = task_of(step, step.trace(BATCH), plan)
    hardware, bare = fs.sim.hardware("h100", host=1e9), fs.sim.hardware("h100", host=1e18)
    taken = updates(hardware.of(task, plan))["l0"] - updates(bare.of(task, plan))["l0"]
    cast = SHARD / 2 * 1.5 if precision == BF16 else 0
    need = made(fs.optim.adamw(1e-3))[1].updates["l0"].moved if update_on == "host" else 0
    made_there = (
        cast if form is None else packed_need(plan.groups[0].wires["all_gather"], torch.float32, SHARD // 8).moved
    )
    assert taken == pytest.approx((need + made_there) / 1e9, rel=1e-3)


def test_casts_on_the_device_take_its_time() -> None:
    step, _ = made(fs.optim.adamw(1e-3))
    hardware, found = fs.sim.hardware("h100", short=True), []
    for precision in (fs.Precision(), BF16):
        plan = step.plan.replace(precision=precision)
        found.append(updates(hardware.of(task_of(step, step.trace(BATCH), plan), plan))["l0"])
    assert found[1] - found[0] == pytest.approx(SHARD / 2 * 1.5 / hardware.speed.bytes_per_s)


def test_casts_of_frozen_leaves_are_made_once_a_step() -> None:
    step, task = made(fs.optim.adamw(1e-3), memory_kind="unpinned_host")
    rules = [fs.Rule("l0.*", fs.fsdp("data"), memory_kind="unpinned_host", trainable=False), (".*", fs.fsdp("data"))]
    for precision, size in ((BF16, SHARD / 2 * 1.5), (fs.Precision(), 0)):
        plan = step.plan.replace(rules=rules, precision=precision)
        frozen = fs.make_train_step(loss_fn, fs.optim.adamw(1e-3), plan)
        costs = fs.sim.hardware("h100", host=1e9).of(task_of(frozen, frozen.trace(BATCH), plan), plan)
        assert costs.host == pytest.approx(size / 1e9)


def test_copies_that_are_given_stay_and_others_are_foreseen() -> None:
    step, task = made(fs.optim.adamw(1e-3), memory_kind="unpinned_host")
    seconds, copies = {("forward", ""): 1.0, ("backward", ""): 2.0}, {("all_gather", "l0"): 1e-3}
    found = fs.sim.hardware("h100", costs=fs.sim.Costs(seconds, copies=copies)).of(task, step.plan).copies
    assert found["all_gather", "l0"] == 1e-3 and 0 < found["all_gather", "l1"] < 1e-3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "10G"}, "host is '10G', a str: give bytes a second"),
        ({"host": 0}, "host=0: give bytes a second"),
        ({"host": 1e9, "costs": fs.sim.Costs()}, "host=1000000000.0: updates are in the measured costs"),
    ],
)
def test_rates_of_hosts_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fs.sim.hardware("h100", **given)


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


def seconds_without_updates(hardware: Hardware, task: PolicyTask, step: Any) -> dict[tuple[str, str], float]:
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


@pytest.mark.parametrize(
    ("write", "moved"),
    [
        (lambda x, y: x.copy_(y), 8000),
        (lambda x, y: torch._foreach_copy_([x, x], [y, y]), 16000),
        (lambda x, y: x.zero_(), 4000),
        (lambda x, y: x.fill_(1.0), 4000),
        (lambda x, y: x.fill_(y[0]), 4004),
        (lambda x, y: torch._foreach_zero_([x]), 4000),
        (lambda x, y: x.mul_(y), 12000),
    ],
)
def test_what_is_overwritten_is_not_read(write: Callable[[Any, Any], Any], moved: int) -> None:
    watch, x, y = Activations([]), torch.ones(1000), torch.ones(1000)
    with watch:
        write(x, y)
        assert watch.take().moved == moved
