"""A state that goes from one outer step to another while a fragment is under way is refused."""

from typing import Any

import pytest
import torch

import fshard as fs

WAYS = {"direct": lambda state, step: state, "moved": lambda state, step: fs.reshard_state(state, step.plan, step.opt)}


def go(way: str, before: dict[str, Any], after: dict[str, Any], steps: int) -> list[int]:
    """On a rank: some steps of one outer step, then three of another; the numbers of its steps."""
    mesh = fs.make_mesh((2, -1), ("replica", "data"))
    params = {"w": torch.ones(4, 256), "b": torch.ones(300)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("replica", "data")))
    inner = fs.make_train_step(lambda p, x: (p["w"].mean() * x).sum() + p["b"].square().sum(), fs.optim.sgd(0.1), plan)
    made = [fs.outer(inner, fs.optim.sgd(0.7), wire="int4", **options) for options in (before, after)]
    state = fs.init_state(made[0].plan, made[0].opt, params=params)
    for _ in range(steps):
        state, _ = made[0](state, torch.ones(2))
    state, numbers = WAYS[way](state, made[1]), []
    for _ in range(3):
        state, _ = made[1](state, torch.ones(2))
        numbers.append(state.step)
    return numbers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "after", "steps", "free"),
    [
        ({"every": 4, "delay": 2}, {"every": 6}, 5, 6),  # the old one's
        ({"every": 3}, {"every": 4, "delay": 2}, 4, 6),  # the new one would take it for its own
        ({"every": 4, "fragments": 2, "delay": 1}, {"every": 4, "fragments": ("b", "w"), "delay": 1}, 4, 5),
    ],
)
def test_a_fragment_under_way_is_noticed(way: str, before: Any, after: Any, steps: int, free: int) -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    with pytest.raises(
        fs.errors.PlanError, match=rf"after step {steps} a fragment is under way .* such as step {free}"
    ):
        mesh.run(go, way, before, after, steps)
    numbers = [free + 1, free + 2, free + 3]
    assert mesh.run(go, way, before, after, free) == [numbers] * 2


def test_the_same_exchanges_go_on_in_another_step() -> None:
    mesh, same = fs.virtual_mesh((2, 1), ("replica", "data")), {"every": 4, "delay": 2}
    assert mesh.run(go, "direct", same, same, 5) == [[6, 7, 8]] * 2
