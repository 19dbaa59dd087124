"""Contests, without steps: who takes part, in which order, and who wins by given times."""

import functools
import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.schedule.auto import TIE, Choice, Rates, choose
from fshard.schedule.contest import (
    FINALISTS,
    MOST,
    NEAR,
    TURNS,
    WORTH,
    Round,
    contenders,
    held,
    judged,
    quartile,
)
from tests.schedule.test_auto import BYTES, FAST, SLOW, task

MEDIUM = Rates(1e9, BYTES / 1.5)
"""Links on which a gather takes less than a unit."""

DEFAULT = fs.Policy()

RATES = {"slow": SLOW, "medium": MEDIUM, "fast": FAST}


@functools.cache
def chosen(rates: Rates, accumulate: int = 1, spare: float = math.inf) -> Choice:
    """A choice by foresight, within so many times the least memory."""
    work = task(accumulate)
    free = choose(work, fs.Auto(), rates)
    if spare == math.inf:
        return free
    limit = int(spare * min(each.memory.peak_bytes for each in free.candidates))
    return choose(work, fs.Auto(memory=limit), rates)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(("accumulate", "spare"), [(1, math.inf), (3, math.inf), (1, 1.1), (1, 1.4), (3, 2.0)])
def test_contenders_differ_fit_together_and_are_worth_it(rates: str, accumulate: int, spare: float) -> None:
    choice = chosen(RATES[rates], accumulate, spare)
    found = contenders(choice)
    assert any(each.candidate is choice.chosen for each in found) and len(found) <= MOST
    assert all(each.policy != DEFAULT for each in found[1:]), "a run begins as any other, if that fits"
    fits = [each for each in choice.candidates if choice.budget is None or each.memory.peak_bytes <= choice.budget]
    worth = WORTH * min(one.seconds for one in fits)
    assert all(each.candidate.seconds <= worth or each.policy == DEFAULT for each in found)
    assert all(one.schedule.ops != two.schedule.ops for one, two in itertools.combinations(found, 2))
    largest = max(each.schedule.memory.arena_bytes for each in found)
    peaks = [each.candidate.memory.peak_bytes - each.schedule.memory.arena_bytes + largest for each in found]
    assert held(found) == max(peaks) and (choice.budget is None or max(peaks) <= choice.budget)
    assert spare < math.inf or any(each.policy.prefetch >= 2 and each.policy.reduces == 2 for each in found)


def test_what_is_robust_takes_part_where_what_gathers_nothing_ahead_ties_with_it() -> None:
    choice = chosen(FAST)
    lean = choice.policy
    assert lean.prefetch == 0 and lean.reduces == 1, "with the least memory of those that tie"
    same = [each.policy for each in contenders(choice) if each.policy.reshard == lean.reshard]
    assert lean in same and any(each.prefetch >= 2 and each.reduces == 2 for each in same)


def test_a_shared_arena_leaves_out_what_would_exceed_the_limit() -> None:
    free = chosen(FAST)
    every = contenders(free)
    assert len(every) > 2 and held(every) > every[0].candidate.memory.peak_bytes
    for limit in range(held(every[:1]), held(every) + BYTES, BYTES):
        some = contenders(free, limit)
        assert held(some) <= limit and any(each.candidate is free.chosen for each in some)
    assert contenders(free, held(every)) == every and [each.candidate for each in contenders(free, 1)] == [free.chosen]
    arenas = [each.schedule.memory.arena_bytes for each in every]
    assert len({*arenas}) > 1
    peak = 2 * max(arenas)
    alike = [replace(each, memory=replace(each.memory, peak_bytes=peak)) for each in free.candidates]
    among = contenders(replace(free, candidates=tuple(alike)), peak)
    lean = {free.schedule.memory.arena_bytes}
    assert {each.schedule.memory.arena_bytes for each in among} == lean, "others would hold more than their peak"


def test_with_other_units_computed_again_nothing_is_timed() -> None:
    choice = chosen(SLOW)
    again = tuple(replace(each, again=("u0",)) for each in choice.candidates if each is not choice.chosen)
    assert len(contenders(replace(choice, candidates=(choice.chosen, *again)))) == 1


@functools.cache
def made(count: int, number: int = 0) -> Round:
    """A round of so many."""
    every = contenders(chosen(SLOW))
    return Round(tuple(itertools.islice(itertools.cycle(every), count)), number)


@pytest.mark.parametrize("count", [2, 3, 7, MOST])
@pytest.mark.parametrize("number", range(len(TURNS)))
def test_each_contender_makes_a_step_in_each_turn_and_the_first_does_not_count(count: int, number: int) -> None:
    one = made(count, number)
    order = [one.who(step) for step in range(one.steps)]
    turns = [order[at : at + count] for at in range(0, len(order), count)]
    assert all(sorted(turn) == list(range(count)) for turn in turns) and len(turns) == 1 + one.turns
    assert all(turn[0] == at % count for at, turn in enumerate(turns)), "each turn begins with another one"
    marked = [100.0 * who + turn for turn, row in enumerate(turns) for who in row]
    assert one.times(marked) == tuple(
        tuple(100.0 * who + turn for turn in range(1, 1 + one.turns)) for who in range(count)
    )


def test_one_slow_phase_puts_nobody_out() -> None:
    even = [[1.0, 1.0, 1.0], [1.02, 1.02, 1.02], [1.3, 1.3, 1.3]]
    slow = [[1.0, 1.4, 1.4], [1.4, 1.4, 1.2], [1.7, 1.7, 1.7]]
    assert judged(even, [1] * 3, False) == judged(slow, [1] * 3, False) == [0, 1]


def test_times_of_earlier_rounds_stay_with_those_who_go_on() -> None:
    first = made(4)
    took = [1.0, 2.0, 1.01, 1.02]
    second = first.after([took[first.who(step)] for step in range(first.steps)])
    assert second.contenders == tuple(first.contenders[i] for i in (0, 2, 3)) and second.last
    assert second.before == tuple((took[i],) * TURNS[0] for i in (0, 2, 3))
    left = second.without(1)
    assert left.contenders == (first.contenders[0], first.contenders[3])
    assert left.before == (second.before[0], second.before[2])
    assert [len(times) for times in left.times([1.0] * left.steps)] == [TURNS[0] + TURNS[1]] * 2


SECONDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=MOST)


@given(SECONDS, st.integers(0, 2**32), st.sampled_from([0.5, 3.0]), st.booleans())
def test_who_goes_on_is_near_the_best_and_depends_on_no_order_or_unit(
    typical: list[float], seed: int, scale: float, last: bool
) -> None:
    sizes = Random(seed).sample(range(1000), len(typical))
    times = [[each] * 3 for each in typical]
    on = judged(times, sizes, last)
    best = min(typical)
    assert on and on == sorted(set(on))
    if last:
        (winner,) = on
        ties = [i for i, each in enumerate(typical) if each <= TIE * best]
        assert winner in ties and sizes[winner] == min(sizes[i] for i in ties)
    else:
        assert typical.index(best) in on and len(on) <= FINALISTS
        assert all(typical[i] <= NEAR * best for i in on)
        assert len(on) == min(FINALISTS, sum(each <= NEAR * best for each in typical))
    order = Random(seed + 1).sample(range(len(typical)), len(typical))
    moved = judged([times[i] for i in order], [sizes[i] for i in order], last)
    assert sorted(typical[order[i]] for i in moved) == sorted(typical[i] for i in on)
    assert scale == 3.0 or judged([[scale * s for s in row] for row in times], sizes, last) == on


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_a_quarter_of_undisturbed_steps_is_enough(count: int, seed: int) -> None:
    draw = Random(seed)
    kept = max((count + 1) // 4, 1)
    times = [1.0] * kept + [1.0 + draw.expovariate(1.0) for _ in range(count - kept)]
    draw.shuffle(times)
    assert quartile(times) == 1.0 and (count < 7 or quartile([*times, 0.1]) == 1.0), "a lucky step decides nothing"


@given(st.lists(st.floats(1.0, 1.3), min_size=2, max_size=MOST), st.integers(0, 2**32))
def test_the_winner_is_among_the_best_although_many_steps_are_disturbed(true: list[float], seed: int) -> None:
    draw, on, count = Random(seed), made(len(true)), 0
    index = list(range(len(true)))
    while len(on.contenders) > 1:
        seconds = []
        for step in range(on.steps):
            turn, who = step // len(on.contenders), index[on.who(step)]
            slow = 5.0 if turn == 0 else draw.choice([1.0, 1.05, 2.0]) if turn % 2 else 1.0
            seconds.append(true[who] * slow)
        count += on.steps
        ranks = judged(on.times(seconds), [each.candidate.memory.peak_bytes for each in on.contenders], on.last)
        index = [index[i] for i in ranks]
        on = on.after(seconds)
    assert true[index[0]] <= TIE * min(true) * 1.0000001
    assert count <= (1 + TURNS[0]) * MOST + (1 + TURNS[1]) * FINALISTS


def test_the_table_says_what_was_measured_and_whether_it_is_over() -> None:
    choice = chosen(SLOW)
    assert choice.settled and "measured" not in str(choice) and "timed" not in choice.reason
    running = replace(choice, settled=False)
    assert "so far, since steps are still being timed" in str(running).splitlines()[1]
    assert "still being timed" in running._repr_html_()
    every = contenders(choice)
    measured = {each.policy: 1.0 + at / 8 for at, each in enumerate(every)}
    done = replace(choice, measured=measured, schedule=every[1].schedule)
    rows = str(done).splitlines()
    assert rows[0] == f"chose {every[1].policy}" and f"of {len(every)} policies that were timed" in rows[1]
    assert rows[2].split()[:2] == ["measured", "step"]
    assert [row for row in rows if row.endswith("<- chosen")][0].split()[0] == "1.125"
    assert sum("1.250 s" in row for row in rows) == 1 and "1.125 s" in done._repr_html_()
    assert len([row for row in rows[3:] if row[:12].strip()]) == len(every)
