"""Learning rates that a caller gives a step or an update, and updates that are skipped by their norm."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from fshard.errors import PlanError, ReplicationError, ShardError
from tests.parts.plain import batch, first, local, plan_on, whole
from tests.shared.bad import attempt
from tests.shared.workers import Pools

RATES = [0.1, 0.1, 0.02, 0.0, 0.05]
OPTS = {
    "adamw": fs.optim.adamw,
    "sgd": lambda lr: fs.optim.sgd(lr, momentum=0.9),
    "masked": lambda lr: fs.optim.masked(fs.optim.sgd(lr), ".*bias.*|b.*"),
    "chain": lambda lr: fs.optim.chain(fs.optim.clip_value(1.0), fs.optim.ema(fs.optim.sgd(lr), 0.9)),
}
WAYS = ["train step", "early", "by parts", "one by one", "read"]


def steps_of(plan: fs.Plan, opt: Any, way: str) -> Any:
    """A step that takes its learning rate: ``(state, batch, lr) -> state``."""
    if way in ("train step", "early"):
        early = fs.Policy(update="in_backward") if way == "early" else None
        train = fs.make_train_step(first, opt, plan, schedule=early)
        return lambda state, rows, lr: train(state, rows, lr=lr)[0]
    grad, update = fs.value_and_grad(first, plan), fs.make_update(opt, plan)

    def fn(state: Any, given: Any) -> Any:
        lr, rows = given
        state, _ = update(state, grad(state, rows)[1], lr=lr)
        return state, tree.map(lambda x: x * 2, state.params) if way == "read" else {}

    step = fn if way == "one by one" else fs.make_step(fn, plan)
    return lambda state, rows, lr: step(state, (lr, rows))[0]


def check(name: str) -> None:
    """A rate that is given is that of an optimizer whose rate is a function of the step."""
    mesh = fs.make_mesh((-1,), ("shard",))
    plan = plan_on(mesh)
    wanted = OPTS[name](lambda number: RATES[number])
    train, want = fs.make_train_step(first, wanted, plan), fs.init_state(plan, wanted, params=whole())
    opt = OPTS[name](7.0)
    states = {way: fs.init_state(plan, opt, params=whole()) for way in WAYS}
    steps = {way: steps_of(plan, opt, way) for way in WAYS}
    for number, lr in enumerate(RATES):
        rows = local(batch(number), plan)
        want, _ = train(want, rows)
        states = {way: steps[way](states[way], rows, lr) for way in WAYS}
    for way in WAYS:
        for got, leaf in zip(tree.leaves(states[way].params), tree.leaves(want.params), strict=True):
            assert torch.allclose(got, leaf, rtol=1e-12, atol=1e-12), way


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTS)
def test_a_rate_that_is_given_counts_on_one_rank(name: str) -> None:
    check(name)


@pytest.mark.processes
def test_a_rate_that_is_given_counts_on_ranks(pool: Pools) -> None:
    pool(2).run(check, "adamw")


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lr", [float("nan"), -0.1, "fast"])
def test_what_is_no_rate_changes_nothing(way: str, lr: Any) -> None:
    plan, opt = plan_on(fs.make_mesh((1,), ("shard",))), fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=whole())
    with pytest.raises(PlanError, match="learning rate"):
        steps_of(plan, opt, way)(state, batch(0), lr)
    assert steps_of(plan, opt, way)(state, batch(0), 0.1).step == 1


def test_an_optimizer_with_several_rates_takes_none() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    opt = fs.optim.partition([(".*bias.*|b.*", fs.optim.sgd(0.1)), (".*", fs.optim.sgd(0.2))])
    state = fs.init_state(plan, opt, params=whole())
    with pytest.raises(PlanError, match="replaces exactly one"):
        steps_of(plan, opt, "train step")(state, batch(0), 0.1)


def differing(way: str) -> tuple[str, bool, bool]:
    """What a step says on ranks that give different rates, and whether the state is as it was and can be used."""
    mesh = fs.make_mesh((-1,), ("shard",))
    plan, opt = plan_on(mesh), fs.optim.sgd(0.1)
    state, step = fs.init_state(plan, opt, params=whole()), steps_of(plan, opt, way)
    before, rows = tree.map(torch.clone, state.params), local(batch(0), plan)
    raised = attempt(lambda: step(state, rows, 0.1 if mesh.rank else 0.1 + 1e-16 * 2))
    same = all(map(torch.equal, tree.leaves(before), tree.leaves(state.params)))
    none = attempt(lambda: step(state, rows, 0.1 if mesh.rank else None))
    assert raised is not None and none is not None
    assert ReplicationError.__name__ in raised.kinds and ReplicationError.__name__ in none.kinds, (raised, none)
    return raised.text, same, step(state, rows, 0.1).step == 1


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_rates_that_differ_between_ranks(pool: Pools, way: str) -> None:
    for text, same, goes_on in pool(2).run(differing, way):
        assert "learning rate" in text and same and goes_on, text


def weighted(params: Any, rows: Any) -> Any:
    """A loss with a weight of its own."""
    return first(params, rows[0]) * rows[1]


@pytest.mark.parametrize("together", [True, False])
def test_updates_with_a_large_norm_are_skipped(together: bool) -> None:
    plan, opt = plan_on(fs.make_mesh((1,), ("shard",))), fs.optim.adamw(0.01)
    rows = [(batch(number), torch.tensor(1e6 if number % 2 else 1.0)) for number in range(4)]
    train = fs.make_train_step(weighted, opt, plan, skip_norm=1e3)
    grad, update = fs.value_and_grad(weighted, plan), fs.make_update(opt, plan, skip_norm=1e3)

    def fn(state: Any, rows: Any) -> Any:
        return update(state, grad(state, rows)[1])

    step = fs.make_step(fn, plan) if together else fn
    want, got = (fs.init_state(plan, opt, params=whole()) for _ in range(2))
    for number in range(4):
        want, told = train(want, rows[number])
        got, metrics = step(got, rows[number])
        assert told.skipped == bool(metrics.skipped) == bool(number % 2)
        assert got.step == (number + 1 if together else want.step)  # a step function's call is one, skipped or not
    assert set(got.late.values()) == ({2} if together else set())
    assert want == replace(got, step=want.step, late={})


def test_limits_that_cannot_be() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    with pytest.raises(ShardError, match="skip_norm"):
        fs.make_update(fs.optim.sgd(0.1), plan, skip_norm=-1.0)
