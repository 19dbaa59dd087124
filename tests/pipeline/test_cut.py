"""Units are cut into stages: by counts, by names, and so that the most costly stage costs least."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard.errors import PlanError
from fshard.pipeline import cut_units

UNITS = ["embed", *[f"layers.{number}" for number in range(11)], "head"]


def sizes(cut: Any, stages: int = 3, costs: list[float] | None = None, units: list[str] = UNITS) -> list[int]:
    """The number of units of each stage."""
    found = cut_units(units, costs if costs is not None else [1.0] * len(units), stages, cut)
    assert list(found) == sorted(found) and len(found) == len(units)
    return [found.count(stage) for stage in range(stages)]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ((4, 4, 5), [4, 4, 5]),
        ([1, 1, 11], [1, 1, 11]),
        (("embed", "layers.3", "head"), [4, 8, 1]),
        (("embed", "layers", "head"), [1, 11, 1]),
        (("*", "layers.*", "layers.1?"), [1, 10, 2]),
        ("balanced", [5, 5, 3]),
    ],
)
def test_ways_to_cut(cut: Any, expected: list[int]) -> None:
    assert sizes(cut) == expected


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ((4, 4, 4), "the counts sum to 12, and there are 13 units\nGive 3 counts"),
        ((0, 4, 9), "stage 0 has 0 units"),
        ((-1, 5, 9), "stage 0 has -1 units"),
        ((4, 9), "there are 2 counts and 3 stages"),
        (("embed", "layers.3"), "there are 2 patterns and 3 stages"),
        (("embed", "layer.3", "head"), "'layer.3' matches no unit; the closest is 'layers"),
        (("embed", r"layers\.\d+", "head"), "it is a regular expression already"),
        (("embed", "layers.3.mlp", "head"), "'layers.3.mlp' is inside of the unit 'layers.3', which cannot be cut"),
        (("layers.0", "layers.3", "head"), "'layers.0' begins stage 0 at 'layers.0', which leaves out 'embed'"),
        (("embed", "layers.3", "layers"), "'layers' begins stage 2 at 'layers.0', and stage 1 begins at 'layers.3'"),
        (("embed", "head", "head"), "stage 1 would be empty"),
        (("embed", 3, "head"), "3 is no pattern of unit names"),
        ("equal", "cut='equal' does not cut the units into stages:\n  it is the name of no way"),
    ],
)
def test_cuts_that_cannot_be(cut: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        sizes(cut)
    assert words in str(caught.value)


def test_more_stages_than_units() -> None:
    with pytest.raises(PlanError, match="there are 14 stages and 13 units, and each stage needs one"):
        sizes("balanced", 14)
    with pytest.raises(PlanError, match="stages=0 is no int of at least 1"):
        sizes("balanced", 0)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), "1", True])
def test_costs_that_are_none(cost: Any) -> None:
    with pytest.raises(PlanError, match=rf"unit 'embed' costs {cost!r}"):
        sizes("balanced", costs=[cost, *[1.0] * 12])
    with pytest.raises(PlanError, match="there are 1 costs and 13 units"):
        sizes("balanced", costs=[1.0])


def all_cuts(units: int, stages: int) -> Iterator[list[int]]:
    """The numbers of units of each stage, in every way."""
    for inner in combinations(range(1, units), stages - 1):
        bounds = [0, *inner, units]
        yield [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.data())
@settings(max_examples=50, deadline=None)
def test_balanced_is_the_best_of_all_ways(costs: list[int], data: Any) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def rank(counts: list[int]) -> tuple[int, list[int]]:
        firsts = [sum(counts[:number]) for number in range(stages)]
        sums = [sum(costs[first : first + count]) for first, count in zip(firsts, counts, strict=True)]
        return max(sums), counts[::-1]

    units = [f"u{number}" for number in range(len(costs))]
    assert sizes("balanced", stages, costs, units) == min(all_cuts(len(costs), stages), key=rank)  # type: ignore[arg-type]


def test_balanced_adds_without_rounding() -> None:
    costs = [0.1] * 10
    assert sizes("balanced", 5, costs, [f"u{number}" for number in range(10)]) == [2, 2, 2, 2, 2]
    assert sizes("balanced", 2, [1e-300, 1e300, 1.0], ["a", "b", "c"]) == [2, 1]
