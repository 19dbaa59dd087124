"""Wires that lanes share in equal parts, beside a plain simulation of it, event by event."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.schedule.clock import Clock, Fleet
from fshard.schedule.wires import Passing, Wire

Job = tuple[str, int, int]
"""A lane, when its transfer comes, and the seconds of the wire that it needs."""


def plain(jobs: list[Job]) -> list[Fraction]:
    """When each transfer is over. From event to event, the first transfers of all lanes get equal parts."""
    left = [Fraction(needs) for _, _, needs in jobs]
    over = [Fraction(0)] * len(jobs)
    at = Fraction(0)
    waiting = [*range(len(jobs))]
    while waiting:
        first: dict[str, int] = {}
        for number in waiting:
            if jobs[number][1] <= at:
                first.setdefault(jobs[number][0], number)
        comes = [Fraction(jobs[number][1]) for number in waiting if jobs[number][1] > at]
        ends = [at + left[number] * len(first) for number in first.values()]
        then = min(comes + ends)
        for number in first.values():
            left[number] -= (then - at) / len(first)
            if left[number] == 0:
                over[number] = then
                waiting.remove(number)
        at = then
    return over


def carried(jobs: list[Job], wire: Wire) -> list[Passing]:
    """The same on a wire."""
    return [wire.add(lane, start, needs, 0.0, 0.0) for lane, start, needs in jobs]


JOBS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8)


@given(JOBS)
def test_lanes_get_equal_parts(jobs: list[Job]) -> None:
    jobs = sorted(jobs, key=lambda job: job[1])
    found = carried(jobs, Wire(max, min))
    assert [float(each.over) for each in found] == pytest.approx([float(over) for over in plain(jobs)])


@given(JOBS)
def test_each_of_several_ranks_has_its_own_wire(jobs: list[Job]) -> None:
    """Times are tensors there. The second rank comes later, by more for each transfer."""
    jobs = sorted(jobs, key=lambda job: job[1])
    wire = Wire(Fleet.larger, Fleet.smaller)
    found = []
    for number, (lane, start, needs) in enumerate(jobs):
        when = torch.tensor([start, start + 3 * number], dtype=torch.float64)
        found.append(wire.add(lane, when, needs, 0.0, 0.0))
    late = [(lane, start + 3 * number, needs) for number, (lane, start, needs) in enumerate(jobs)]
    for rank, own in enumerate((jobs, late)):
        wanted = [float(over) for over in plain(own)]
        assert [float(each.over[rank]) for each in found] == pytest.approx(wanted)


def test_a_step_begins_with_what_the_one_before_has_left() -> None:
    wire = Wire(Clock.larger, Clock.smaller)
    wire.add("a", 0.0, 10.0, 0.0, 4.0)
    wire.begin(7.0)
    assert wire.add("b", 1.0, 1.0, 0.0, 0.0).over == 3.0  # 3 seconds were left of the first one, 2 when it comes
    assert wire.add("a", 1.0, 1.0, 0.0, 0.0).over == 5.0


def test_a_burst_arrives_before_the_wire_has_carried_it_and_no_transfer_before_its_least() -> None:
    wire = Wire(max, min)
    assert wire.add("a", 0.0, 10.0, 1.0, 4.0).arrival(max) == 6.0
    assert wire.add("a", 20.0, 3.0, 21.0, 4.0).arrival(max) == 21.0
