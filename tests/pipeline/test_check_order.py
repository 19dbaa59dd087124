"""The check refuses orders that are spoiled in any way, and shows where."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.pipeline import Action, PipelineOrder, check_order, make_order, parse
from fshard.pipeline.named_orders import ORDERS
from fshard.pipeline.order_steps import play

Lanes = list[list[Action]]
NAMES = st.sampled_from([(name, chunks) for name in ORDERS for chunks in ([1, 3] if name == "zb_h1" else [None])])
ORDER = st.builds(
    lambda named, ranks, count: make_order(named[0], ranks, count, named[1]), NAMES, *[st.integers(2, 6)] * 2
)


@given(NAMES, st.integers(1, 7), st.integers(1, 15))
@settings(max_examples=30, deadline=None)
def test_orders_that_have_names_pass(named: tuple[str, int | None], ranks: int, microbatches: int) -> None:
    check_order(make_order(named[0], ranks, microbatches, named[1]))


def dropped(lanes: Lanes, draw: random.Random) -> None:
    lane = draw.choice(lanes)
    lane.pop(draw.randrange(len(lane)))


def duplicated(lanes: Lanes, draw: random.Random) -> None:
    lane = draw.choice(lanes)
    lane.insert(draw.randrange(len(lane) + 1), draw.choice(lane))


def moved(lanes: Lanes, draw: random.Random) -> None:
    first, second = draw.sample(lanes, 2)
    second.insert(draw.randrange(len(second) + 1), first.pop(draw.randrange(len(first))))


def reversed_backwards(lanes: Lanes, draw: random.Random) -> None:
    """Two backwards of one stage change places."""
    lane = draw.choice(lanes)
    stage = draw.choice(lane).stage
    places = [at for at, action in enumerate(lane) if action.stage == stage and action.kind in "BI"]
    first, second = draw.sample(places, 2)
    lane[first], lane[second] = lane[second], lane[first]


def backward_first(lanes: Lanes, draw: random.Random) -> None:
    """A backward comes before the forward that it needs."""
    lane = draw.choice(lanes)
    forward = draw.choice([action for action in lane if action.kind == "F"])
    backward = next(
        a for a in lane if (a.stage, a.microbatch) == (forward.stage, forward.microbatch) and a.kind in "BI"
    )
    lane.remove(backward)
    lane.insert(lane.index(forward), backward)


def another_kind(lanes: Lanes, draw: random.Random) -> None:
    lane = draw.choice(lanes)
    at = draw.randrange(len(lane))
    others = [kind for kind in "FBIW" if kind != lane[at].kind]
    lane[at] = Action(lane[at].stage, draw.choice(others), lane[at].microbatch)


def unknown_stage(lanes: Lanes, draw: random.Random) -> None:
    lane = draw.choice(lanes)
    lane.append(Action(1000, "F", 0))


def reversed_forwards(lanes: Lanes, draw: random.Random) -> None:
    """Two forwards of one stage change places: neighbours read another order, or the backward comes too early."""
    lane = draw.choice(lanes)
    stage = draw.choice(lane).stage
    places = [at for at, action in enumerate(lane) if action.stage == stage and action.kind == "F"]
    first, second = draw.sample(places, 2)
    lane[first], lane[second] = lane[second], lane[first]


SPOILS = [
    dropped,
    duplicated,
    moved,
    reversed_backwards,
    backward_first,
    another_kind,
    unknown_stage,
    reversed_forwards,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@given(order=ORDER, draw=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_spoiled_orders_are_refused(
    spoil: Callable[[Lanes, random.Random], None], order: PipelineOrder, draw: random.Random
) -> None:
    lanes = [list(lane) for lane in order.ranks]
    spoil(lanes, draw)
    with pytest.raises(ScheduleError, match=rf"the order {order.name} cannot run: (?s:.*)\n  rank 0"):
        check_order(PipelineOrder(order.name, order.homes, tuple(map(tuple, lanes))))


@given(order=ORDER, draw=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_what_is_accepted_can_run(order: PipelineOrder, draw: random.Random) -> None:
    """Two neighbours change places: harmless, or refused; refused in any case where one of them needs the other."""
    lanes = [list(lane) for lane in order.ranks]
    lane = draw.choice(lanes)
    at = draw.randrange(len(lane) - 1)
    first, second = lane[at : at + 2]
    lane[at : at + 2] = second, first
    spoiled = PipelineOrder(order.name, order.homes, tuple(map(tuple, lanes)))
    try:
        check_order(spoiled)
    except ScheduleError:
        return
    assert (first.stage, first.microbatch) != (second.stage, second.microbatch)
    assert first.stage != second.stage or first.kind not in "BI" or second.kind not in "BI"
    assert not play(spoiled.ranks, spoiled.stages, lambda action: 1.0).missing


def refusal(*lanes: str, homes: str = "0 1") -> str:
    """The message of an order that cannot run."""
    text = "\n".join([f"rank {rank} {lane}" for rank, lane in enumerate(lanes)])
    with pytest.raises(ScheduleError) as caught:
        check_order(parse(f"pipeline mine\nhomes {homes}\n{text}"))
    return str(caught.value)


def test_a_circle_names_ranks_and_actions() -> None:
    message = refusal("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert message.split("\n") == [
        "the order mine cannot run: ranks wait for each other: rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1F1 for 0F1 "
        "of rank 0",
        "  rank 0   0F0  [0B0]  0F1   0B1",
        "  rank 1         1F0   1F1   1B0   1B1",
        "Make the order again with make_order, or undo the changes to its lists.",
    ]


def test_a_circle_of_three_ranks_has_no_others_in_it() -> None:
    message = refusal("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1", homes="0 1 2 3")
    circle = "wait for each other: rank 1 at 1B0 for 2B0 of rank 2, rank 2 at 2F1 for 1F1 of rank 1"
    assert message.split("\n")[0].endswith(circle)


def test_messages_are_read_in_the_order_in_which_they_are_sent() -> None:
    message = refusal("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    assert "rank 0 sends 0F0 to rank 1 before 0F1, and 1F1 reads 0F1 first" in message
    message = refusal("0F0 0F1 0B0 0B1 2F0 2F1 2B0 2B1", "1F0 1F1 1B0 1B1", homes="0 1 0")
    assert "rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1B0 for 2B0 of rank 0" in message


def test_forwards_and_backwards_have_queues_apart() -> None:
    check_order(
        parse(
            "pipeline v\nhomes 0 1 1 0\nrank 0 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1 "
            + "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
        )
    )


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        (("0F0 0B0", "1F0 1B0 0F1"), "0F1 is on rank 1, and stage 0 is on rank 0"),
        (("0F0 0B0", "1F0 1B0 7F0"), "7F0 is of stage 7, and there are 2 stages"),
        (("0F0 0B0", "1F0 1B0 1F0"), "1F0 is there twice"),
        (("0F0 0B0", "1B0"), "1F0 is there not once"),
        (("0F0 0B0 0F2 0B2", "1F0 1B0"), "0F1 is there not once"),
        (("0F0 0B0", "1F0 1I0 1B0 1W0"), "stage 1 has for microbatch 0 once 1B0 and once 1I0, and needs one of both"),
        (("0F0 0B0", "1F0 1W0"), "stage 1 has for microbatch 0 not once 1B0 and not once 1I0"),
        (("0F0 0B0", "1F0 1I0"), "1W0 is there not once, and one goes with 1I0"),
        (("0F0 0B0", "1F0 1B0 1W0"), "1W0 is there once, and none goes with 1B0"),
        (("0F0 0B0", "1F0 1W0 1I0"), "rank 1 waits at 1W0 for 1I0, which it runs later"),
        (("0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1"), "0B0 comes after 0B1: a stage's backwards go in the order"),
        (("", ""), "it has no actions"),
    ],
)
def test_each_rule_says_what_is_wrong(lanes: tuple[str, str], words: str) -> None:
    assert words in refusal(*lanes)


def test_the_lanes_around_the_action_are_shown() -> None:
    order = make_order("1f1b", 4, 50)
    lanes = [list(lane) for lane in order.ranks]
    lanes[2].remove(Action(2, "B", 30))
    with pytest.raises(ScheduleError) as caught:
        check_order(PipelineOrder("1f1b", order.homes, tuple(map(tuple, lanes))))
    shown = str(caught.value).split("\n")[1:-1]
    assert len(shown) == 4 and all(len(row) < 80 for row in shown)
    assert "[2F30]" in shown[2]
