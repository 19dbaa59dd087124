"""Scaled losses in steps of parts: the bits of the train step, and updates that are skipped on all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from tests.parts.plain import FUNCTIONS, Parts, batch, first, local, plan_on, whole
from tests.shared.workers import Pools

RULE = fs.LossScale(initial=2.0**1000, interval=2, backoff=2.0**-990)
"""Its first scale overflows float64, and the next one does not."""


def check(world: int) -> None:
    """By parts, in one step and one by one, as by the train step."""
    plan, opt = plan_on(fs.make_mesh((world,), ("shard",))), fs.optim.adamw(1e-2)
    grad = fs.value_and_grad(huge, plan, loss_scale=RULE)
    update = fs.make_update(opt, plan, clip_norm=0.5, loss_scale=RULE)

    def fn(state: Any, batch: Any) -> Any:
        loss, grads = grad(state, batch)
        state, metrics = update(state, grads)
        return state, {"loss": loss, "norm": metrics.grad_norm, "skipped": metrics.skipped}

    steps = fs.make_train_step(huge, opt, plan, clip_norm=0.5, loss_scale=RULE), fs.make_step(fn, plan), fn
    states = [fs.init_state(plan, opt, params=whole()) for _ in steps]
    skipped = []
    for number in range(5):
        part = local(batch(number), plan)
        made = [step(state, part) for step, state in zip(steps, states, strict=True)]
        states = [state for state, _ in made]
        assert states[0].step == states[2].step
        assert states[1].step == number + 1  # a step function's call is one, whether it updates or not
        assert states[0].scale == states[1].scale == states[2].scale
        assert made[0][1].skipped == bool(made[1][1]["skipped"]) == bool(made[2][1]["skipped"])
        skipped.append(made[0][1].skipped)
        if not skipped[-1]:
            assert made[0][1].loss.item() == made[1][1]["loss"].item()
    assert skipped[0]
    assert not all(skipped)
    assert states[0] == replace(states[1], step=states[0].step, late={})
    assert set(states[1].late.values()) == {sum(skipped)}
    got, want = (torch.cat([x.flatten() for x in fs.tree.leaves(state.params)]) for state in (states[2], states[0]))
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def huge(params: Any, batch: Any) -> Any:
    """A loss whose gradient overflows at the first scale."""
    return first(params, batch) * 2.0**30


def test_on_one_rank() -> None:
    check(1)


def test_on_two_ranks(pool: Pools) -> None:
    pool(2).run(check, 2)


def test_a_skipped_update_cannot_be_read_in_the_step() -> None:
    plan, opt = plan_on(fs.make_mesh((1,), ("shard",))), fs.optim.adamw(1e-2)
    parts = Parts(plan, opt, loss_scale=RULE)
    parts.made["update", r"dis\..*", 0.1] = fs.make_update(opt, plan, only=r"dis\..*", loss_scale=RULE)
    step = fs.make_step(lambda state, batch: FUNCTIONS["in_turns"](parts, state, batch), plan)
    state = fs.init_state(plan, opt, params=whole())
    with pytest.raises(fs.errors.PlanError, match="return that state as it is"):
        step(state, batch())
    assert state.step == 0
