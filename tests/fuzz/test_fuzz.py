"""A share of the generated runs, and that the comparison would tell a wrong one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.fuzz import run, step_draw, step_run
from tests.fuzz.draw import draw
from tests.shared.workers import Pools

FEW = (3, 4, 7, 8, 10)
"""One on real ranks, one of several steps an update, some with gathers in few bits, and one that is refused."""
TWELVE = range(2, 14)


@pytest.mark.parametrize("cases", [FEW, pytest.param(TWELVE, marks=pytest.mark.slow)], ids=["few", "twelve"])
@pytest.mark.filterwarnings("ignore:.*left their schedule")
def test_generated_runs_are_those_of_one_process(pool: Pools, cases: Sequence[int]) -> None:
    verdicts = {number: run.check(draw(7, number, real=0.1), pool) for number in cases}
    wrong = {number: verdict.why for number, verdict in verdicts.items() if verdict.kind == "wrong"}
    assert not wrong, f"python -m tests.fuzz --seed 7 --real 0.1 --case {next(iter(wrong))}"
    assert sum(verdict.kind == "refused" for verdict in verdicts.values()) <= len(cases) / 3


def test_a_case_is_the_same_whenever_it_is_drawn() -> None:
    assert draw(3, 5) == draw(3, 5) != draw(3, 6) != draw(4, 6)


@pytest.mark.long
def test_the_comparison_tells_a_run_that_trains_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(7, 7)
    assert run.check(case).kind == "right"
    plain = run.plain(dataclasses.replace(case, mean=not case.mean, opt="sgd" if case.opt != "sgd" else "adamw"))
    monkeypatch.setattr(run, "plain", lambda case: plain)
    assert run.check(case).kind == "wrong"


def test_copies_along_a_model_axis_are_compared_where_ranks_update_parts() -> None:
    def train() -> Any:
        with fs.make_mesh((2, 2), ("data", "model")) as mesh:
            params = {"w": torch.ones(7, 3), "b": torch.ones(1)}
            plan = fs.make_plan(params, mesh, [fs.Rule(r".*", P(), opt=fs.fsdp("data"))], batch=P("data"))
            opt = fs.optim.sgd(0.1)
            step = fs.make_train_step(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), opt, plan, debug=True)
            state, _ = step(fs.init_state(plan, opt, params=params), torch.ones(2, 7))
            return fs.settle(state).params["w"]

    results = fs.virtual_mesh((4,), ("any",)).run(train)
    assert all(torch.equal(result, results[0]) for result in results) and not torch.equal(results[0], torch.ones(7, 3))


STEPS = (2, 16, 38, 39, 47)
"""Step functions of several passes; some of them did not equal plain PyTorch once."""


@pytest.mark.parametrize("cases", [STEPS, pytest.param(range(60), marks=pytest.mark.slow)], ids=["few", "sixty"])
def test_generated_step_functions_are_those_of_plain_pytorch(pool: Pools, cases: Sequence[int]) -> None:
    verdicts = {number: step_run.check(step_draw.draw(0, number, real=0.1), pool) for number in cases}
    wrong = {number: verdict.why for number, verdict in verdicts.items() if verdict.kind != "right"}
    assert not wrong, f"python -m tests.fuzz --of steps --seed 0 --case {next(iter(wrong))}"


@pytest.mark.parametrize(("seed", "number"), [(991100, 29)])
def test_step_functions_that_once_went_wrong(seed: int, number: int) -> None:
    """A flag that lets a pass read a sum of parameters in the place of a state whose gathers are on their way."""
    assert step_run.check(step_draw.draw(seed, number)).kind == "right"


def test_the_comparison_tells_another_step_function() -> None:
    case = dataclasses.replace(step_draw.draw(0, 38), flags=(0, 0, 0))
    changed = dataclasses.replace(case, opt="sgd" if case.opt == "adamw" else "adamw")
    want, told = step_run.plain(case)
    other, said = step_run.plain(changed)
    assert told != said and any(not torch.equal(a, other[0][path]) for path, a in want[0].items())
