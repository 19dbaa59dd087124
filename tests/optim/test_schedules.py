"""Learning-rate schedules: values at the corners, shape between them, and what constructors refuse."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import PlanError
from fshard.optim import adamw, sgd
from fshard.optim.schedules import constant, linear, warmup_cosine, warmup_linear, warmup_stable_decay

steps = st.integers(0, 10_000)


@given(steps)
def test_constant(step: int) -> None:
    assert constant(0.3)(step) == 0.3


def test_linear() -> None:
    assert [linear(0.0, 1.0, steps=4)(step) for step in range(7)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert linear(0.3, 0.1, steps=7)(0) == 0.3
    assert linear(0.3, 0.1, steps=7)(7) == 0.1


@pytest.mark.parametrize("make", [warmup_linear, warmup_cosine])
class TestWarmup:
    def test_corners(self, make: Any) -> None:
        lr = make(0.7, warmup=4, total=20, floor=0.1)
        assert lr(0) == pytest.approx(0.7 / 5)
        assert lr(4) == 0.7
        assert lr(12) == pytest.approx(0.4)  # half way down, both shapes are half way
        assert lr(20) == lr(21) == lr(10**9) == 0.1

    def test_no_warmup_starts_at_the_peak(self, make: Any) -> None:
        assert make(0.7, warmup=0, total=1)(0) == 0.7

    def test_counts_are_in_updates(self, make: Any) -> None:
        lr = make(1.0, warmup=9, total=10)
        assert [round(lr(step), 6) for step in range(11)] == [i / 10 for i in range(1, 11)] + [0.0]

    @given(
        peak=st.floats(0.0, 10.0),
        part=st.floats(0.0, 1.0),
        warmup=st.integers(0, 50),
        more=st.integers(1, 50),
    )
    def test_rises_then_falls_inside_its_bounds(
        self, make: Any, peak: float, part: float, warmup: int, more: int
    ) -> None:
        lr = make(peak, warmup, warmup + more, floor=peak * part)
        values = [lr(step) for step in range(warmup + more + 3)]
        slack = 1e-12 * max(peak, 1.0)
        assert all(0.0 <= value <= peak + slack for value in values)
        assert all(b >= a - slack for a, b in pairwise(values[: warmup + 1]))
        assert all(b <= a + slack for a, b in pairwise(values[warmup:]))
        assert values[-3:] == [peak * part] * 3


def test_the_cosine_is_one() -> None:
    lr = warmup_cosine(2.0, warmup=0, total=8)
    for step in range(9):
        assert lr(step) == pytest.approx(1.0 + math.cos(math.pi * step / 8))


def test_schedules_are_values_whose_repr_is_the_call() -> None:
    lr = warmup_cosine(3e-4, warmup=10, total=100)
    assert repr(lr) == "warmup_cosine(peak=0.0003, warmup=10, total=100, floor=0.0)"
    assert repr(constant(0.1)) == "constant(value=0.1)"
    assert {lr: 1}[warmup_cosine(3e-4, 10, 100)] == 1


BAD = [
    (lambda: constant(-1.0), "constant", ["value = -1.0: must lie in [0, inf)"]),
    (lambda: constant(math.nan), "constant", ["value = nan"]),
    (
        lambda: linear(-1.0, math.inf, steps=0),
        "linear",
        ["start = -1.0", "stop = inf", "steps = 0: must be at least 1"],
    ),
    (
        lambda: warmup_cosine(-0.1, warmup=-1, total=2.5),  # type: ignore[arg-type]
        "warmup_cosine",
        ["peak = -0.1", "warmup = -1: must be at least 0", "total = 2.5: must be an int"],
    ),
    (
        lambda: warmup_linear(0.1, warmup=10, total=10, floor=0.2),
        "warmup_linear",
        ["floor = 0.2: must not be above peak = 0.1", "total = 10: must be above warmup = 10"],
    ),
    (
        lambda: adamw(-1.0, betas=(1.0, -0.1), eps=0.0, weight_decay=-0.1, decay="("),
        "adamw",
        [
            "lr = -1.0: must lie in [0, inf), or a function of the step",
            "betas[0] = 1.0: must lie in [0, 1)",
            "betas[1] = -0.1: must lie in [0, 1)",
            "eps = 0.0: must lie in (0, inf)",
            "weight_decay = -0.1: must lie in [0, inf)",
            "decay: '(' is not a regular expression",
        ],
    ),
    (
        lambda: adamw("fast", betas=[0.9, 0.99], decay=3),  # type: ignore[arg-type]
        "adamw",
        ["lr = 'fast': must be a number", "betas = [0.9, 0.99]: must be a tuple", "decay = 3: must be None"],
    ),
    (lambda: adamw(True), "adamw", ["lr = True: must be a number"]),
    (
        lambda: sgd(math.inf, momentum=1.1, weight_decay=math.nan, dampening=-1.0),
        "sgd",
        ["lr = inf", "momentum = 1.1: must lie in [0, 1]", "weight_decay = nan", "dampening = -1.0"],
    ),
    (
        lambda: sgd(0.1, nesterov=True),
        "sgd",
        ["nesterov = True: needs momentum > 0 and dampening = 0, not 0.0 and 0.0"],
    ),
    (lambda: sgd(0.1, momentum=0.9, dampening=0.1, nesterov=True), "sgd", ["not 0.9 and 0.1"]),
]


@pytest.mark.parametrize(("make", "name", "problems"), BAD, ids=[f"{name}-{len(p)}" for _, name, p in BAD])
def test_all_problems_are_in_one_report(make: Any, name: str, problems: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    head, *body = str(caught.value).splitlines()
    assert head == f"{name}(...): invalid arguments:"
    assert len(body) == len(problems) + 1
    for line, problem in zip(body, problems, strict=False):
        assert problem in line


def test_a_plateau_ends_in_a_straight_fall() -> None:
    rate = warmup_stable_decay(2.0, warmup=3, total=10, cooldown=4, floor=1.0)
    assert [rate(step) for step in (0, 2, 3, 6, 8, 10, 99)] == [0.5, 1.5, 2.0, 2.0, 1.5, 1.0, 1.0]
    with pytest.raises(PlanError, match="warmup = 3 and cooldown = 8: must be at most total = 10"):
        warmup_stable_decay(2.0, warmup=3, total=10, cooldown=8)
    with pytest.raises(PlanError, match="floor = 3.0: must not be above peak = 2.0"):
        warmup_stable_decay(2.0, warmup=3, total=10, cooldown=4, floor=3.0)
