"""Which steps nothing disturbed."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from fshard.schedule.fit import LEAST, calm


def test_the_fastest_tenth_of_steps_counts_by_the_slowest_rank() -> None:
    steps = [1.0 + (number % 7) / 10 for number in range(100)]
    chosen = calm([steps, [2.0 if number < 50 else 1.0 for number in range(100)]])
    assert len(chosen) == 10 and all(number >= 50 and number % 7 <= 1 for number in chosen)
    assert calm([[3.0, 1.0]]) == [0, 1] and calm([[3.0, 1.0, 2.0, 9.0]]) == [0, 1, 2]  # few are better than one


def test_short_steps_count_by_stretches_as_long_as_those_of_long_steps() -> None:
    """Of a machine that is slow for .3 s and fast for .1 s, in turns, long steps see no fast tenth."""
    turn = [0.02] * 15 + [0.01] * 10
    chosen = calm([turn * 40])
    assert 0.012 < statistics.fmean((turn * 40)[number] for number in chosen) < 0.017
    rest = [0.02] * 800 + [0.01] * 200  # one that is fast for a second shows what it can do
    assert all(rest[number] == 0.01 for number in calm([rest]))


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=200))
def test_stretches_leave_some_steps_of_any_number(seconds: list[float]) -> None:
    chosen = calm([seconds])
    assert min(len(seconds), LEAST) <= len(chosen) and len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(len(seconds)))
