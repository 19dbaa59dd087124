"""All positions of a pipeline simulated together: the formulas of idle time, and cases that a hand can follow."""

from typing import Any

import pytest

import fshard as fs
from fshard.errors import PlanError
from fshard.pipeline import bubble, make_order
from fshard.pipeline.pipeline_simulation import PipelineSimulation
from tests.pipeline.abstract_programs import traced

SECONDS = {
    ("forward", ""): 1.0,
    ("forward", "root"): 0.0,
    ("backward", ""): 2.0,
    ("backward", "root"): 0.0,
}
PARTED = {**SECONDS, ("backward", ""): 1.0, ("weight", ""): 1.0}


def simulated(order: str, *sizes: int, costs: fs.sim.Costs | None = None, **more: Any) -> PipelineSimulation:
    """A pipeline of one block a stage."""
    seconds = PARTED if order.startswith(("zb", "dual")) else SECONDS
    found: PipelineSimulation = fs.sim.simulate(traced(order, *sizes, **more).schedules, costs or fs.sim.Costs(seconds))
    return found


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9)])
def test_one_stage_a_rank_idles_for_all_ranks_but_one(order: str, ranks: int, microbatches: int) -> None:
    found = simulated(order, ranks, microbatches)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert found.seconds == pytest.approx(3 * (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (2, 3, 3)])
def test_interleaved_divides_by_chunks(ranks: int, microbatches: int, chunks: int) -> None:
    found = simulated("interleaved", ranks, microbatches, chunks)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches * chunks + ranks - 1))


@pytest.mark.parametrize(("order", "ranks", "chunks"), [("zb_h1", 4, 1), ("zbv", 2, 2), ("dualpipev", 2, 2)])
def test_orders_of_two_part_backwards_idle_as_their_orders_do(order: str, ranks: int, chunks: int) -> None:
    found = simulated(order, ranks, 6, chunks)
    assert found.bubble == pytest.approx(bubble(make_order(order, ranks, 6, chunks)))


def test_messages_take_the_time_of_their_link() -> None:
    """Of one microbatch: F0, a message, F1 and B1, a message, B0."""
    message = 4 * 8 * 4  # four tokens of eight numbers
    link = fs.sim.Link(bytes_per_s=message / 0.25, latency=0.5)
    found = simulated("1f1b", 2, 1, costs=fs.sim.Costs(SECONDS, links={"stage": link}))
    assert found.seconds == pytest.approx(1 + 0.75 + 1 + 2 + 0.75 + 2)
    first, last = found.exposed
    assert first == pytest.approx({"receive": 0.75 + 3 + 0.75})
    assert last == pytest.approx({"receive": 1.75, "send": 0.75, "consensus": 2})  # its message, then the end of B0
    assert found.compute == pytest.approx((3.0, 3.0))
    assert found.bubble == pytest.approx(1 - 6 / 15)
    receives = [at for at, op in enumerate(found.ranks[1].schedule) if op.kind == "receive"]
    assert [found.ranks[1].ends[at] for at in receives] == pytest.approx([1.75])


def test_a_link_carries_one_message_after_the_other() -> None:
    """A message takes as long as two forwards, so the link sets the pace of GPipe's forwards."""
    link = fs.sim.Link(bytes_per_s=4 * 8 * 4 / 2.0)
    found = simulated("gpipe", 2, 3, costs=fs.sim.Costs(SECONDS, links={"stage": link}))
    receives = [at for at, op in enumerate(found.ranks[1].schedule) if op.kind == "receive"]
    assert [found.ranks[1].ends[at] for at in receives] == pytest.approx([3.0, 5.0, 7.0])


def test_what_a_sum_over_stages_and_collectives_of_a_stage_wait_for() -> None:
    costs = fs.sim.Costs(SECONDS, links={"stage": fs.sim.Link(1e3), "data": fs.sim.Link(1e3)})
    found = simulated("1f1b", 2, 2, costs=costs, data=2, tied=True)
    for waits in found.exposed:
        assert {"stage_sum", "all_gather", "receive"} <= {*waits}
    for each, waits in zip(found.ranks, found.exposed, strict=True):
        assert each.compute + sum(waits.values()) == pytest.approx(found.seconds)
    assert "waits: receive" in str(found) and "<table" in found._repr_html_()


def test_nothing_gets_later_when_a_link_gets_faster() -> None:
    slow, fast = (
        simulated("interleaved", 2, 4, 2, costs=fs.sim.Costs(SECONDS, fs.sim.Link(rate, latency)))
        for rate, latency in ((1e2, 0.1), (1e3, 0.05))
    )
    for before, after in zip(slow.ranks, fast.ranks, strict=True):
        assert all(b >= a for b, a in zip(before.ends, after.ends, strict=True))


def test_a_position_alone_is_simulated_as_before() -> None:
    found = traced("1f1b", 2, 2)
    assert fs.sim.simulate(found.schedule, fs.sim.Costs(SECONDS)).seconds == pytest.approx(6.0)


def test_refusals() -> None:
    schedules = traced("1f1b", 2, 2).schedules
    with pytest.raises(PlanError, match=r"forward blocks.1: not in the costs"):
        fs.sim.simulate(schedules, fs.sim.Costs({("forward", "blocks.0"): 1.0}))
    with pytest.raises(PlanError, match=r"forward blocks.7: no such op"):
        fs.sim.simulate(schedules, fs.sim.Costs({("forward", "blocks.7"): 1.0, ("forward", ""): 1.0}))
    with pytest.raises(PlanError, match="noise is given, and the stages"):
        fs.sim.simulate(schedules, fs.sim.Costs(), None, fs.sim.Noise(0.1))
    with pytest.raises(PlanError, match="costs"):
        fs.sim.simulate(schedules, None)
