"""Wires that lanes share in equal parts, beside a plain simulation of it, event by event."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.schedule.clock import Clock, Fleet
from fshard.schedule.link import Link
from fshard.schedule.wires import Passing, SharedWire

Job = tuple[str, float, float, int]
"""A lane, when its transfer is issued, when its ranks have come, and the seconds of the wire that it needs."""

Times = list[tuple[float, float]]
"""When each transfer starts, and when it is over."""


def plain(jobs: list[Job], latency: int, together: int) -> Times:
    """From event to event, the first transfers of all lanes that have started get equal parts."""
    left = [Fraction(needs) for *_, needs in jobs]
    starts: list[Fraction | None] = [None] * len(jobs)
    overs: list[Fraction | None] = [None] * len(jobs)

    def ready(number: int) -> Fraction | None:
        """When it starts, as far as that is known."""
        before = [each for each in range(number) if jobs[each][0] == jobs[number][0]]
        room = overs[before[-together]] if len(before) >= together else Fraction(0)
        last = starts[before[-1]] if before else Fraction(0)
        if room is None or last is None:
            return None
        return max(max(Fraction(jobs[number][2]), room) + latency, last)

    at = Fraction(0)
    while None in overs:
        first: dict[str, int] = {}
        for number, (lane, *_) in enumerate(jobs):
            if starts[number] is not None and overs[number] is None:
                first.setdefault(lane, number)
        comes = [(each, ready(each)) for each in range(len(jobs)) if starts[each] is None]
        ends = [at + left[number] * len(first) for number in first.values()]
        then = min([when for _, when in comes if when is not None] + ends)
        for number in first.values():
            left[number] -= (then - at) / len(first)
            if left[number] == 0:
                overs[number] = then
        for number, when in comes:
            if when is not None and when <= then:
                starts[number] = then
        at = then
    return [(float(start or 0), float(over or 0)) for start, over in zip(starts, overs, strict=True)]


def told(transfers: list[Passing], rank: int | None = None) -> Times:
    """The same of transfers that a wire has carried."""
    own = [(each.start, each.arrival) for each in transfers]
    return own if rank is None else [(float(start[rank]), float(arrival[rank])) for start, arrival in own]


def flat(times: Times) -> list[float]:
    return [number for pair in times for number in pair]


LATENCY, TOGETHER = st.integers(0, 6), st.integers(1, 3)
PARTS = st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 9), st.integers(1, 9), st.booleans())
"""A lane, the seconds since the one before was issued, those that its ranks are late, needs, and whether to wait."""


@given(st.lists(PARTS, min_size=1, max_size=8), LATENCY, TOGETHER)
def test_lanes_get_equal_parts(parts: list[tuple[str, int, int, int, bool]], latency: int, together: int) -> None:
    """Whatever the order in which transfers start is, and whichever are waited for before others are issued."""
    wire, link = SharedWire(max, min), Link(1.0, latency=latency, together=together)
    now, jobs, found = 0.0, [], []
    for lane, since, late, needs, waits in parts:
        now += since
        found.append(wire.add(lane, link, needs, now, now + late))
        jobs.append((lane, now, now + late, needs))
        if waits:
            now = max(now, wire.arrival(found[len(found) // 2]))
    for each in found:
        wire.arrival(each)
    assert flat(told(found)) == pytest.approx(flat(plain(jobs, latency, together)))


@given(st.lists(PARTS, min_size=1, max_size=8), LATENCY, TOGETHER)
def test_each_of_several_ranks_has_its_own_wire(
    parts: list[tuple[str, int, int, int, bool]], latency: int, together: int
) -> None:
    """Times are tensors there. The second rank is later, by more for each transfer."""
    wire, link = SharedWire(Fleet.larger, Fleet.smaller), Link(1.0, latency=latency, together=together)
    now, found = torch.zeros(2, dtype=torch.float64), []
    jobs: tuple[list[Job], list[Job]] = ([], [])
    for lane, since, late, needs, waits in parts:
        now = now + torch.tensor([since, since + 3])
        found.append(wire.add(lane, link, needs, now, now + late))
        for rank, own in enumerate(jobs):
            own.append((lane, float(now[rank]), float(now[rank]) + late, needs))
        if waits:
            now = torch.maximum(now, wire.arrival(found[len(found) // 2]))
    for each in found:
        wire.arrival(each)
    for rank, own in enumerate(jobs):
        assert flat(told(found, rank)) == pytest.approx(flat(plain(own, latency, together)))


def test_a_transfer_that_waits_for_its_lane_holds_back_no_other() -> None:
    wire, link = SharedWire(max, min), Link(1.0)
    first, second = (wire.add("a", link, 2, 0.0, 0.0) for _ in range(2))
    other = wire.add("b", link, 1, 0.5, 0.5)
    assert [wire.arrival(each) for each in (other, first, second)] == [2.5, 3.0, 5.0]
    assert second.start == 3.0


def test_a_step_begins_with_what_the_one_before_has_left() -> None:
    wire, link = SharedWire(Clock.larger, Clock.smaller), Link(1.0, burst=4.0)
    assert wire.arrival(wire.add("a", link, 10, 0.0, 0.0)) == 6.0
    wire.begin(7.0)
    other, again = wire.add("b", Link(1.0), 1, 1.0, 1.0), wire.add("a", Link(1.0), 1, 1.0, 1.0)
    assert wire.arrival(other) == 3.0  # 3 seconds were left of the first one, 2 when it comes
    assert wire.arrival(again) == 5.0


def test_a_burst_arrives_before_the_wire_has_carried_it_and_no_transfer_faster_than_the_peak() -> None:
    wire, link = SharedWire(max, min), Link(1.0, burst=4.0, peak=3.0)
    assert wire.arrival(wire.add("a", link, 10, 0.0, 0.0)) == 6.0
    assert wire.arrival(wire.add("a", link, 3, 20.0, 20.0)) == 21.0


def test_what_comes_after_an_arrival_does_not_change_it() -> None:
    """The burst has arrived at 6; the wire owes its bytes until 10."""
    wire = SharedWire(max, min)
    first = wire.add("a", Link(1.0, burst=4.0), 10, 0.0, 0.0)
    second = wire.add("a", Link(1.0, burst=4.0), 1, 0.0, 0.0)
    wire.add("b", Link(1.0), 5, 8.0, 8.0)
    assert wire.arrival(first) == 6.0 and second.start == 6.0


def test_threads_have_their_turn_when_the_device_waits_or_later() -> None:
    link = Link(1.0)
    for waits, started in ((0.5, 0.5), (3.0, 2.0)):
        wire = SharedWire(max, min)
        passing = wire.add("a", link, 1, 0.0, 0.0, turn=2.0)
        assert wire.awaited(passing, waits, [wire]) == started + 1.0 and passing.start == started
    wire = SharedWire(max, min)
    first, late = wire.add("a", link, 1, 0.0, 0.0), wire.add("b", link, 1, 1.0, 4.0, turn=2.0)
    assert wire.awaited(first, 1.5, [wire]) == 1.0  # it has arrived, so that nobody waits
    assert wire.awaited(late, 2.0, [wire]) == 5.0  # its ranks have not come yet


@pytest.mark.parametrize("arrived", [False, True])
def test_a_device_that_waits_gives_its_processor_to_threads_of_all_its_wires(arrived: bool) -> None:
    own, other, link = SharedWire(max, min), SharedWire(max, min), Link(1.0)
    first = own.add("a", link, 1 if arrived else 3, 0.0, 0.0)
    late = other.add("b", link, 1, 1.0, 1.0, turn=4.0)
    assert own.awaited(first, 2.0, [own, other]) == (1.0 if arrived else 3.0)
    assert other.arrival(late) == (6.0 if arrived else 3.0) and late.start == (5.0 if arrived else 2.0)
