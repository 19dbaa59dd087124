"""Which steps count in a calibration."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from fshard.schedule.fit import LEAST, counted


def test_steps_around_the_lower_quartile_count_by_the_slowest_rank() -> None:
    steps = [number / 100 for number in range(100)]
    assert counted([steps]) == [*range(10, 40)]
    assert counted([steps, [9.0 if number < 20 else 0.0 for number in range(100)]]) == [*range(30, 60)]


def test_few_steps_are_better_than_one() -> None:
    assert counted([[3.0]]) == [0] and counted([[3.0, 1.0]]) == [0, 1]
    assert counted([[3.0, 1.0, 2.0, 9.0]]) == [0, 1, 2]


def test_neither_luck_nor_neighbours_count() -> None:
    """A few steps are lucky, and half of all are disturbed: what counts is neither."""
    steps = [0.5] * 5 + [1.0] * 45 + [1.7] * 50
    assert {steps[number] for number in counted([steps])} == {1.0}


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=200))
def test_some_steps_of_any_number_count(seconds: list[float]) -> None:
    chosen = counted([seconds])
    assert min(len(seconds), LEAST) <= len(chosen) and chosen == sorted(set(chosen))
    assert max(seconds[number] for number in chosen) <= max(statistics.median_high(seconds), *sorted(seconds)[:LEAST])


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=50), st.permutations(range(50)))
def test_their_order_does_not_matter(seconds: list[float], order: list[int]) -> None:
    moved = [seconds[number] for number in order if number < len(seconds)]
    assert sorted(seconds[n] for n in counted([seconds])) == sorted(moved[n] for n in counted([moved]))
