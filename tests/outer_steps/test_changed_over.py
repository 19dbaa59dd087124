"""A state that goes from one outer step to another while a fragment is under way is refused."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.state.exchanges import Exchanges, Timetable

GOOD: dict[str, Any] = {"every": 4, "delay": 1, "fragments": 2, "over": "replica"}
BAD: list[dict[str, Any]] = [
    {"every": 0},
    {"every": True},
    {"every": 1e999},
    {"delay": 4},
    {"delay": -1},
    {"fragments": 5},
    {"fragments": None},
    {"fragments": []},
    {"every": 10**18, "fragments": 10**17},
]
Way = Callable[[fs.TrainState, fs.types.TrainStep, str], fs.TrainState]


def restored(state: fs.TrainState, step: fs.types.TrainStep, folder: str) -> fs.TrainState:
    """The state from a checkpoint of it."""
    with fs.Checkpointer(folder) as checkpoints:
        checkpoints.save(state)
        return checkpoints.restore(step.plan, step.opt)


WAYS: dict[str, Way] = {
    "direct": lambda state, step, folder: state,
    "moved": lambda state, step, folder: fs.reshard_state(state, step.plan, step.opt),
    "restored": restored,
    "copied": lambda state, step, folder: copy.deepcopy(state),
    "mapped": lambda state, step, folder: fs.tree.map(lambda x: x, state),
}


def loss(params: Any, x: Tensor) -> Tensor:
    """Of a matrix and a vector."""
    return (params["w"].mean() * x).sum() + params["b"].square().sum()


def go(way: str, before: dict[str, Any], after: dict[str, Any] | None, steps: int, folder: str) -> list[int]:
    """On a rank: some steps of one outer step, then three of another, or of one without exchanges; their numbers."""
    mesh = fs.make_mesh((2, -1), ("replica", "data"))
    params = {"w": torch.ones(4, 256), "b": torch.ones(300)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("replica", "data")))
    inner = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
    made: list[fs.types.TrainStep] = [
        fs.outer(inner, fs.optim.sgd(0.7), wire="int4", **options) for options in (before, after) if options is not None
    ]
    if after is None:
        made.append(fs.make_train_step(loss, made[0].opt, made[0].plan))
    state = fs.init_state(made[0].plan, made[0].opt, params=params)
    for _ in range(steps):
        state, _ = made[0](state, torch.ones(2))
    state, numbers = WAYS[way](state, made[1], f"{folder}/{steps}"), []
    for _ in range(3):
        state, _ = made[1](state, torch.ones(2))
        numbers.append(state.step)
    return numbers


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "after", "steps", "free"),
    [
        ({"every": 4, "delay": 2}, {"every": 6}, 5, 6),  # the old one's
        ({"every": 3}, {"every": 4, "delay": 2}, 4, 6),  # the new one would take it for its own
        ({"every": 4, "fragments": 2, "delay": 1}, {"every": 4, "fragments": ("b", "w"), "delay": 1}, 4, 5),
    ],
)
def test_a_fragment_under_way_is_noticed(
    tmp_path: Path, way: str, before: Any, after: Any, steps: int, free: int
) -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    with pytest.raises(
        fs.errors.PlanError, match=rf"after step {steps} a fragment is under way .* such as step {free}"
    ):
        mesh.run(go, way, before, after, steps, str(tmp_path))
    numbers = [free + 1, free + 2, free + 3]
    assert mesh.run(go, way, before, after, free, str(tmp_path)) == [numbers] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_exchanges_is_refused(tmp_path: Path, way: str) -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    with pytest.raises(fs.errors.PlanError, match=r"one of fs.outer\(step, ..., every=3, fragments=1, delay=0\)"):
        mesh.run(go, way, {"every": 3}, None, 4, str(tmp_path))


@pytest.mark.parametrize("way", WAYS)
def test_the_same_exchanges_go_on_in_another_step(tmp_path: Path, way: str) -> None:
    mesh, same = fs.virtual_mesh((2, 1), ("replica", "data")), {"every": 4, "fragments": ("b", "w"), "delay": 1}
    assert mesh.run(go, way, same, same, 4, str(tmp_path)) == [[5, 6, 7]] * 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, *(json.dumps(GOOD | bad) for bad in BAD)],
    ids=lambda text: text[:80],
)
def test_a_text_of_exchanges_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Exchanges.read(text)


def test_nothing_is_under_way_but_what_has_left_and_not_arrived() -> None:
    for every, delay, number in itertools.product(range(1, 7), range(6), range(1, 7)):
        if delay < every and number <= every:
            table = Timetable(every, delay, number)
            for step in range(30):
                left = {table.leaving(at): at for at in range(step - delay + 1, step + 1)}
                assert table.under_way(step) == {f: at for f, at in left.items() if f is not None}
