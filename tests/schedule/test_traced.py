"""The whole path from a real model to its schedule, without processes: trace, build, check, print.

``FSHARD_REGEN_GOLDENS=1 pytest tests/schedule/test_traced.py`` writes the golden texts anew; read the diff.
"""

import os
from pathlib import Path

import pytest

import fshard as fs
from fshard.schedule import check, parse
from tests.shared import zoo

GOLDENS = Path(__file__).parent / "goldens"
POLICIES = {
    "prefetch0": fs.Policy(0, 1),
    "prefetch1": fs.Policy(1, 1),
    "prefetch2": fs.Policy(),
    "keep": fs.Policy(1, 1, reshard=False),
}


def traced(policy: fs.Policy, rank: int = 0, name: str = "gpt") -> fs.Schedule:
    """The schedule of an example on an abstract mesh of four ranks."""
    example = zoo.build(name)
    plan = example.plan(fs.abstract_mesh((4,), ("shard",), rank=rank))
    step = fs.make_train_step(example.loss_fn, fs.optim.adamw(1e-3), plan, schedule=policy)
    return step.trace(zoo.cut(example.batch(0), rank, 4)).schedule


@pytest.mark.parametrize("name", POLICIES)
def test_schedule_of_the_gpt_is_the_golden_one(name: str) -> None:
    schedule = traced(POLICIES[name])
    file = GOLDENS / f"traced_gpt_{name}.txt"
    if os.environ.get("FSHARD_REGEN_GOLDENS") == "1":
        file.write_text(f"{schedule}\n")
    assert f"{schedule}\n" == file.read_text()
    assert parse(str(schedule)) == schedule


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", zoo.EXAMPLES)
def test_every_rank_traces_the_same_schedule(name: str) -> None:
    schedules = [traced(fs.Policy(), rank, name) for rank in range(4)]
    check(schedules[0])
    assert len({schedule.hash for schedule in schedules}) == 1


def test_a_trace_without_processes_cannot_run() -> None:
    example = zoo.build("gpt")
    plan = example.plan(fs.abstract_mesh((4,), ("shard",)))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(example.loss_fn, opt, plan)
    state = fs.init_state(plan, opt, params=example.params())
    with pytest.raises(fs.errors.PlanError, match="no processes"):
        step(state, zoo.cut(example.batch(0), 0, 4))
    with pytest.raises(fs.errors.PlanError, match="no schedule yet"):
        print(step.schedule)
