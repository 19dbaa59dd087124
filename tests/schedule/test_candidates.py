"""What ``schedule="auto"`` may choose beside prefetches and keeps: secondary shards, and units computed again."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PlanError
from fshard.foresight.foresee import task_of
from fshard.schedule import Policy
from fshard.schedule.auto import Choice, choose
from fshard.schedule.candidates import candidates
from fshard.sim import Costs, Link

WIDTH, DEPTH, ROWS = 32, 4, 64
RULE = fs.optim.adamw(1e-2)
GIVEN = {"compute": 1e8, "wire": 1e9}


@fs.unit
def layer(params: Any, x: Tensor) -> Tensor:
    """Its activations are larger than its weights."""
    return x + torch.tanh(torch.sin(x @ params["w"]).exp() @ params["w"].t())


def loss_fn(params: Any, x: Tensor) -> Tensor:
    """Of some layers, one after the other."""
    for each in params.values():
        x = layer(each, x)
    return x.square().mean()


def plan_on(mesh: fs.Mesh) -> fs.Plan:
    """Layers that all axes shard."""
    torch.manual_seed(0)
    params = {f"l{i}": {"w": torch.randn(WIDTH, WIDTH) / WIDTH**0.5} for i in range(DEPTH)}
    axes = mesh.axis_names
    every: Any = axes if len(axes) > 1 else axes[0]
    return fs.make_plan(params, mesh, [(".*", fs.fsdp(every))], batch=fs.P(every), units=tuple(params))


def batch(number: int = 0) -> Tensor:
    """A global batch."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def train(mesh: fs.Mesh, policy: Any, steps: int = 3, **options: Any) -> tuple[list[float], fs.types.TrainStep]:
    """The losses of some steps, and the step."""
    plan = plan_on(mesh)
    state = fs.init_state(plan, RULE, seed=3, init=[(".*", fs.init.normal(0.2))])
    step = fs.make_train_step(loss_fn, RULE, plan, schedule=policy, **options)
    losses = []
    for number in range(steps):
        rows = batch(number).chunk(mesh.size)[mesh.rank] if mesh.transport is not None else batch(number)
        state, metrics = step(state, rows)
        losses.append(metrics.loss.item())
    return losses, step


@functools.cache
def foreseen(mesh: fs.Mesh, memory: int | None = None) -> Choice:
    """The choice on a mesh that need not exist."""
    step = fs.make_train_step(loss_fn, RULE, plan_on(mesh), schedule=fs.Auto(memory=memory, **GIVEN))
    choice = step.trace(batch().chunk(mesh.size)[0]).choice
    assert choice is not None
    return choice


def least(choice: Choice) -> int:
    """The bytes of the policy that holds least."""
    return min(each.memory.peak_bytes for each in choice.candidates)


HOSTS = (2, 4), ("host", "local")


def test_secondary_shards_win_where_hosts_have_a_slow_link() -> None:
    plan = plan_on(fs.abstract_mesh(*HOSTS))
    step = fs.make_train_step(loss_fn, RULE, plan)
    task = task_of(step, step.trace(batch()), plan)
    seconds = {("forward", ""): 1e-3, ("backward", ""): 2e-3}
    slow, fast = Link(4e5), Link(1e10)
    costs = Costs(seconds, links={"host+local": slow, "local": fast})
    free = choose(task, fs.Auto(), costs)
    # To keep everything sends as little, and holds more than the least that secondary shards hold.
    tight = min(each.memory.peak_bytes for each in free.candidates if each.policy.secondary)
    chosen = choose(task, fs.Auto(memory=tight), costs)
    assert chosen.policy.secondary == ("local",) and "regather" in {op.kind for op in chosen.schedule}
    without = choose(replace(task, second={}), fs.Auto(memory=tight), costs)
    assert chosen.chosen.seconds < 0.9 * without.chosen.seconds
    # They are no use where both links are equally slow, and none where all is free.
    assert not choose(task, fs.Auto(), Costs(seconds, links={"host+local": fast, "local": fast})).policy.secondary


@pytest.mark.parametrize("mesh", [((8,), ("data",)), ((8, 1), ("host", "local")), ((1, 8), ("host", "local"))], ids=str)
def test_one_axis_has_no_secondary_shards(mesh: Any) -> None:
    plan = plan_on(fs.abstract_mesh(*mesh))
    step = fs.make_train_step(loss_fn, RULE, plan)
    assert not any(policy.secondary for policy in candidates(task_of(step, step.trace(batch()), plan), "deferred"))


ABSTRACT = fs.abstract_mesh((2,), ("data",))
UNITS = tuple(f"layer(l{i}.w)" for i in range(DEPTH))


def test_units_are_computed_again_where_nothing_else_fits() -> None:
    free = foreseen(ABSTRACT)
    assert not any(each.again for each in free.candidates), "nobody has asked for less memory"
    assert not foreseen(ABSTRACT, least(free)).task.again
    tight = foreseen(ABSTRACT, least(free) - 1)
    assert 0 < len(tight.task.again) < DEPTH and tight.chosen.memory.peak_bytes < least(free)
    assert "remat=" in str(tight).splitlines()[0] and str(tight).count(" <- chosen") == 1
    assert foreseen(ABSTRACT, least(tight)).task.again == UNITS
    with pytest.raises(
        PlanError, match=rf"memory={least(tight) - 1} bytes is too small .* remat=4 units, layer\(l0.w\)"
    ):
        foreseen(ABSTRACT, least(tight) - 1)


def test_what_the_user_says_of_remat_stands() -> None:
    auto = fs.Auto(memory=least(foreseen(ABSTRACT)) - 1, **GIVEN)
    step = fs.make_train_step(loss_fn, RULE, plan_on(ABSTRACT), schedule=auto, remat=[("**", None)])
    with pytest.raises(PlanError, match="too small for every schedule"):
        step.trace(batch().chunk(2)[0])


@pytest.mark.parametrize("all_of_them", [False, True])
def test_units_that_are_computed_again_keep_every_bit(all_of_them: bool) -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    plain, _ = train(mesh, Policy())
    tight = foreseen(ABSTRACT, least(foreseen(ABSTRACT)) - 1)
    limit = least(tight) if all_of_them else least(foreseen(ABSTRACT)) - 1
    losses, step = train(mesh, fs.Auto(memory=limit, **GIVEN))
    found = step.trace(batch())
    assert losses == plain and found.choice is not None
    assert found.choice.task.again == (UNITS if all_of_them else tight.task.again)
    assert found.footprint.peak_bytes == found.choice.chosen.memory.peak_bytes <= limit


def test_secondary_shards_that_were_chosen_keep_every_bit() -> None:
    mesh = fs.virtual_mesh((2, 2), ("host", "local"))
    plain, _ = train(mesh, Policy())
    table = foreseen(fs.abstract_mesh((2, 2), ("host", "local"))).candidates
    tight = next(each for each in table if each.policy == Policy(2, 2, fs.secondary("local"))).memory.peak_bytes
    losses, step = train(mesh, fs.Auto(memory=tight, compute=1e12, wire=1e6))
    assert step.schedule.policy.secondary == ("local",) and losses == plain
