"""A failure at any part of an example's step, on any rank, leaves every state as it was on all ranks.

After a good step comes one that fails, then two more good ones. Their numbers must equal, bit for bit, those of a run
without the failure.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.parts.after_failures import TIMEOUT, compared
from tests.parts.examples import CASES, Case
from tests.parts.injection import FAULT, Fault, Rule, injected
from tests.shared.virtual import Virtual
from tests.shared.workers import Pools


def run(name: str, how: str, chosen: Callable[..., list[tuple[str, str]]], gloo: bool = False) -> list[str]:
    """On a rank: what is not as it must be after failures.

    Args:
        name: of the example.
        how: ``"step"``, or ``"asking"`` for one that runs part by part.
        chosen: of the points of its step, and the number of ranks, those at which it fails, and on which rank or "all".
        gloo: without shared memory.
    """
    out, fault = [], Fault()
    FAULT.set(fault)
    options = {"shared_memory": False} if gloo else {}
    with fs.make_mesh((-1,), ("data",), timeout=TIMEOUT, **options) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*run one by one")
        case = CASES[name](mesh, Rule(0.05, momentum=0.9))
        want = _steps(case, fault, "")[0]
        for point, where in chosen(fault.points(), mesh.size):
            mine = where in ("all", str(mesh.rank)) and (point != "rule" or fault.updates)
            place = f"{name}, {how}, {point} of {fault.calls} on {where}"
            out += compared(place, functools.partial(_steps, case, fault, point, mine), want, point, mine)
    return out


def _steps(case: Case, fault: Fault, point: str, mine: bool = False) -> tuple[list[Tensor], BaseException | None]:
    """All numbers of three good steps, and what the one that fails has raised."""
    raised, told, state = None, list[Tensor](), case.start()
    fault.updates = False  # the trials of a rule of one's own, on every rank, are not updates
    for number in range(3):
        if number == 1 and point:
            fault.point = point if mine else ""
            try:
                case.step(state, case.batch(number))
            except Exception as error:
                raised = error
            fault.point = ""
        state, metrics = case.step(state, case.batch(number))
        told += tree.leaves(metrics)
    states: list[fs.TrainState] = [*case.frozen]
    tree.swap(states.append, fs.TrainState, state)
    for each in states:
        told += [x.clone() for x in tree.leaves((each.params, each.opt_state, torch.tensor(each.step)))]
    return told, raised


def everywhere(points: list[str], ranks: int) -> list[tuple[str, str]]:
    """Each point on the first rank, on the last, and on all. The last may have nothing to update."""
    last = [str(ranks - 1)] * (ranks > 1)
    return [(point, where) for point in points for where in ("0", *last * (point != "rule"), "all")]


def one_of_each(points: list[str], ranks: int) -> list[tuple[str, str]]:
    """The last point of each kind, on ranks in turn."""
    last = {point.split()[0]: point for point in points}
    return [(point, str(number % ranks)) for number, point in enumerate(last.values())]


def with_failures(*args: Any) -> list[str]:
    """On a rank."""
    with injected(args[1]):
        return run(*args)


@pytest.mark.long
@pytest.mark.parametrize("name", ["actor_critic", "dpo"])  # many updates, a state in the batch
def test_a_failure_of_one_rank_fails_the_step_of_all(pool: Pools, name: str) -> None:
    assert pool(2).run(with_failures, name, "step", one_of_each, timeout=120.0) == [[], []]


def in_the_rule(points: list[str], ranks: int) -> list[tuple[str, str]]:
    """The update rule, on the first rank and on all that have anything to update."""
    return [("rule", "0"), ("rule", "all")]


@pytest.mark.long
def test_a_rank_without_anything_to_update_fails_with_the_others() -> None:
    with injected("step"):
        assert Virtual(3).run(run, "gan", "step", in_the_rule) == [[], [], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "gloo"), [(1, False), (2, False), (2, True), (3, True), (4, False)])
@pytest.mark.parametrize("how", ["step", "asking"])
@pytest.mark.parametrize("name", CASES)
def test_a_failure_anywhere_leaves_every_state(pool: Pools, name: str, how: str, world: int, gloo: bool) -> None:
    problems = pool(world).run(with_failures, name, how, everywhere, gloo, timeout=880.0)
    assert not any(problems), "\n".join(line for lines in problems for line in lines)
