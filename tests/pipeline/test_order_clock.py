"""Times of orders: the published formulas of idle time and memory."""

import math
from typing import Any

import pytest

from fshard.errors import PlanError, ScheduleError
from fshard.pipeline import PipelineOrder, bubble, make_order, parse, times
from tests.pipeline.held_microbatches import held, held_on_ranks

SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 9), (4, 16), (6, 13), (8, 8), (8, 31)]


def idle(order: PipelineOrder, **costs: Any) -> float:
    """The idle time of a step, averaged over the ranks."""
    costs = {"forward": 1, "input": 1, "weight": 1, **costs}
    step = max(max(row) for row in times(order, **costs).ends)
    return step * bubble(order, **costs)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_idles_for_all_ranks_but_one(name: str, ranks: int, microbatches: int) -> None:
    share = (ranks - 1) / (microbatches + ranks - 1)
    for costs in ({}, {"forward": 2.0, "input": 0.5, "weight": 0.0}, {"input": 3.0}):
        assert bubble(make_order(name, ranks, microbatches), **costs) == pytest.approx(share)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_zb_h1_idles_a_third_of_1f1b(ranks: int, microbatches: int) -> None:
    ours, theirs = make_order("zb_h1", ranks, microbatches), make_order("1f1b", ranks, microbatches)
    assert idle(ours) == pytest.approx(idle(theirs) / 3)
    costs = {"forward": 1.0, "input": 1.2, "weight": 0.9}
    assert idle(make_order("zb_h1", 4, 16), **costs) == pytest.approx(3 * (1.0 + 1.2 - 0.9), abs=0.5)
    assert max(held_on_ranks(ours)) == max(held_on_ranks(theirs)) == min(ranks, microbatches)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_interleaved_divides_by_chunks(ranks: int, microbatches: int, chunks: int) -> None:
    """For every number of microbatches, not for multiples of the ranks alone."""
    order = make_order("interleaved", ranks, microbatches, chunks)
    assert bubble(order) == pytest.approx((ranks - 1) / (microbatches * chunks + ranks - 1))
    assert idle(order, forward=1 / chunks, input=1 / chunks, weight=1 / chunks) == pytest.approx(
        idle(make_order("1f1b", ranks, microbatches)) / chunks
    )


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_zb_h1_with_chunks_idles_for_the_way_down_alone(ranks: int, microbatches: int, chunks: int) -> None:
    assert idle(make_order("zb_h1", ranks, microbatches, chunks)) == pytest.approx(ranks - 1)


@pytest.mark.parametrize(("name", "least"), [("zbv", 1.5), ("dualpipev", 2)])
def test_orders_in_a_v_idle_for_the_way_down_alone(name: str, least: float) -> None:
    for ranks in (1, 2, 3, 5):
        for microbatches in range(math.ceil(least * ranks), 13):
            assert idle(make_order(name, ranks, microbatches)) == pytest.approx(ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_zbv_has_no_bubble_between_its_first_and_last_action(ranks: int) -> None:
    for microbatches in range(2 * ranks, 14):
        played = times(make_order("zbv", ranks, microbatches), 1, 1, 1)
        for rank, (starts, ends) in enumerate(zip(played.starts, played.ends, strict=True)):
            assert starts[0] == rank and ends[-1] - starts[0] == 6 * microbatches


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_memory(ranks: int, microbatches: int) -> None:
    fewer = [min(ranks - rank, microbatches) for rank in range(ranks)]
    assert held(make_order("1f1b", ranks, microbatches)) == tuple(fewer)
    assert held(make_order("gpipe", ranks, microbatches)) == (microbatches,) * ranks
    assert max(held_on_ranks(make_order("zbv", ranks, microbatches))) <= 2 * ranks
    assert max(held_on_ranks(make_order("dualpipev", ranks, microbatches))) <= 2 * ranks + 1


def test_a_microbatch_is_held_until_its_weights_have_gradients() -> None:
    order = parse("pipeline x\nhomes 0\nrank 0 0F0 0I0 0F1 0B1 0W0")
    assert held(order) == (2,)


def test_costs_by_stage_and_time_to_send() -> None:
    order = make_order("1f1b", 2, 2)
    played = times(order, forward={0: 1, 1: 2}, input=lambda stage: 1 + stage, weight=0.5, send=0.25)
    assert played.starts == ((0, 1, 6, 10.5), (1.25, 3.25, 5.75, 7.75))
    assert played.ends[1] == (3.25, 5.75, 7.75, 10.25)


def test_a_step_without_time_has_no_bubble() -> None:
    assert bubble(make_order("1f1b", 2, 2), 0, 0, 0) == 0


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward": -1.0}, "F of stage 0 costs -1.0\n  F of stage 1 costs -1.0"),
        ({"input": {0: 1.0}}, "I of stage 1 has no cost"),
        ({"weight": lambda stage: math.inf}, "W of stage 0 costs inf"),
        ({"send": "1"}, "send costs '1'"),
        ({"forward": True}, "F of stage 0 costs True"),
    ],
)
def test_costs_that_are_no_times(costs: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        bubble(make_order("1f1b", 2, 2), **costs)


@pytest.mark.parametrize("lane", ["0B0 0F0", "0F0 0B0 1F0"])
def test_an_order_that_cannot_run_has_no_times(lane: str) -> None:
    with pytest.raises(ScheduleError, match="cannot run"):
        bubble(parse(f"pipeline x\nhomes 0\nrank 0 {lane}"))
