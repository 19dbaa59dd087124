"""Learning rates are asked once a step, counts travel with moments, and state dicts have the settings of each rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import optim as O  # noqa: N812
from fshard.errors import PlanError

LEAVES = {"w": torch.zeros(4), "b": torch.zeros(4)}


def loss(params: Any, x: Tensor) -> Tensor:
    """Its gradient is the mean of the batch, everywhere."""
    return (params["w"].sum() + params["b"].sum()) * x.mean()


def planned(ranks: int = 2) -> fs.Plan:
    """Two flat leaves."""
    return fs.make_plan(LEAVES, fs.virtual_mesh((ranks,), ("data",)), [(".*", fs.fsdp("data"))])


WRAPS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda opt: opt,
    "chain": lambda opt: O.chain(O.scale(1.0), opt),
    "partition": lambda opt: O.partition([("w", opt), ("b", opt)]),
    "ema": lambda opt: O.ema(opt, 0.9),
    "every": lambda opt: O.every(1, opt),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rate_that_reads_a_variable_is_that_of_the_step(wrap: str) -> None:
    plan, box = planned(), [1.0]
    opt = WRAPS[wrap](O.sgd(lambda step: box[0]))
    state, step = fs.init_state(plan, opt, params=LEAVES), fs.make_train_step(loss, opt, plan)
    told = []
    for box[0] in (1.0, 0.1):
        state, metrics = step(state, torch.ones(4))
        told.append(metrics.lr)
    box[0] = 5.0
    assert told == [1.0, 0.1]
    torch.testing.assert_close(fs.unshard(state.params, plan)["w"], torch.full((4,), -1.1))


def test_the_factor_of_a_chain_is_that_of_the_step() -> None:
    plan, box = planned(), [1.0]
    opt = O.chain(O.scale(lambda step: box[0]), O.sgd(1.0))
    state, step = fs.init_state(plan, opt, params=LEAVES), fs.make_train_step(loss, opt, plan)
    state, _ = step(state, torch.ones(4))
    box[0] = 5.0
    torch.testing.assert_close(fs.unshard(state.params, plan)["w"], -torch.ones(4))


def test_lr_of_a_partition_is_a_mapping_by_pattern() -> None:
    plan = planned()
    opt = O.partition([("w", O.sgd(0.5)), ("b", O.sgd(0.25))])
    state, step = fs.init_state(plan, opt, params=LEAVES), fs.make_train_step(loss, opt, plan)
    for wrong in ({"x": 1.0}, {"b": -1.0}, 1.0, {}):
        with pytest.raises(PlanError):
            step(state, torch.ones(4), lr=wrong)
    state, _ = step(state, torch.ones(4), lr={"b": 2.0})
    params = fs.unshard(state.params, plan)
    torch.testing.assert_close((params["w"], params["b"]), (torch.full((4,), -0.5), torch.full((4,), -2.0)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_counts_travel_with_moments(tmp_path: Path, ranks: int) -> None:
    plan, opt = planned(ranks), O.adamw(0.1)
    state, step = fs.init_state(plan, opt, params=LEAVES), fs.make_train_step(loss, opt, plan)
    for number in range(6):
        state, _ = step(state, torch.full((4,), 1.0 + number))
    checkpointer = fs.Checkpointer(tmp_path)
    checkpointer.save(state)
    fresh = fs.init_state(plan, opt, params=LEAVES)
    with pytest.raises(PlanError, match="unlike numbers of updates"):
        checkpointer.restore(plan, opt, rules=[(r"opt\.exp_avg\..*", r"\g<0>"), (".*", None)], into=fresh)
    moved = checkpointer.restore(plan, opt, rules=[(r"opt\..*", r"\g<0>"), (".*", None)], into=fresh)
    moved, metrics = step(moved, torch.ones(4))
    state, _ = step(checkpointer.restore(plan, opt), torch.ones(4))
    assert moved.step == 1
    before = fs.unshard(checkpointer.restore(plan, opt).params, plan)["w"]
    wanted = fs.unshard(state.params, plan)["w"] - before * (1 - 0.1 * 0.01)
    torch.testing.assert_close(fs.unshard(moved.params, plan)["w"], wanted)
    assert moved.late == {"w": -6, "b": -6}


def test_state_dicts_have_the_settings_of_each_rule() -> None:
    plan = planned(1)
    inner = O.adamw(0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for opt in (O.partition([("b", O.adamw(0.1)), ("w", inner)]), O.chain(O.scale(1.0), inner), O.masked(inner, "w")):
        state, step = fs.init_state(plan, opt, params=LEAVES), fs.make_train_step(loss, opt, plan)
        state, _ = step(state, torch.ones(4))
        found = fs.io.to_optim_state_dict(state, opt)
        [group] = [group for group in found["param_groups"] if "w" in group["params"]]
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.01, (0.8, 0.9), 1e-6, 0.3)
        paths = [path for each in found["param_groups"] for path in each["params"]]
        named = [(path, torch.nn.Parameter(torch.zeros(4))) for path in paths]
        twin = torch.optim.AdamW([{"params": [dict(named)[p] for p in g["params"]]} for g in found["param_groups"]])
        twin.load_state_dict(fs.io.to_optim_state_dict(state, opt, keys="index"))
        for _, param in named:
            param.grad = torch.ones(4)
        twin.step()
        idle = isinstance(opt, O.partition) and opt.rules[1][1] is None
        assert (dict(named)["b"].abs().max() == 0) == idle
