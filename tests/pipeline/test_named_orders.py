"""Orders that have names: those of PyTorch where it has one, and complete for all other numbers."""

from collections import Counter

import pytest

from fshard.errors import PlanError
from fshard.pipeline import Action, check_order, make_order, parse, parse_csv
from fshard.pipeline.named_orders import ORDERS
from fshard.pipeline.order_steps import play
from tests.pipeline.peers import their_csv, their_order

SAME = [
    *[("gpipe", ranks, count, 1) for ranks, count in ((1, 1), (2, 5), (4, 2), (4, 8))],
    *[("1f1b", ranks, count, 1) for ranks, count in ((1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (8, 16))],
    *[("interleaved", *sizes) for sizes in ((2, 4, 2), (4, 8, 2), (4, 10, 2), (4, 3, 3), (2, 2, 4), (1, 3, 2))],
    *[("zb_h1", *sizes) for sizes in ((2, 4, 1), (4, 8, 1), (4, 12, 2), (4, 10, 3), (2, 8, 2), (4, 3, 1))],
    *[("zbv", ranks, count, 2) for ranks, count in ((1, 1), (2, 5), (4, 8), (4, 3), (3, 1), (4, 13))],
    *[("dualpipev", ranks, count, 2) for ranks, count in ((1, 2), (2, 4), (3, 6), (3, 9), (4, 10), (5, 11))],
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SAME)
def test_the_order_is_that_of_pytorch(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    order = make_order(name, ranks, microbatches, chunks)
    assert order.ranks == their_order(name, ranks, microbatches, chunks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb_h1", 2), ("zbv", 2), ("dualpipev", 2)])
def test_messages_that_pytorch_adds_are_consistent(name: str, chunks: int) -> None:
    text = their_csv(name, 4, 8, chunks)
    assert "SEND_F" in text and "RECV_B" in text
    assert len(parse_csv(text, name).homes) == 8
    check_order(parse_csv(text, name))


def chunk_counts(name: str) -> list[int]:
    """The stages a rank that are tried."""
    rules = ORDERS[name]
    return [count for count in (1, 2, 3) if rules.least <= count <= (rules.most or 3)]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_numbers_of_microbatches_run_to_the_end(name: str, ranks: int) -> None:
    for chunks in chunk_counts(name):
        for microbatches in (1, 2, 3, 4, 5, 7, 10, 11):
            order = make_order(name, ranks, microbatches, chunks)
            assert not play(order.ranks, order.stages, lambda action: 1.0).missing
            backwards = Counter((a.stage, a.microbatch) for lane in order.ranks for a in lane if a.kind in "BI")
            assert set(backwards.values()) == {1} and len(backwards) == order.stages * microbatches
            assert parse(str(order)) == order


def test_one_stage_on_one_rank_alternates() -> None:
    (lane,) = make_order("1f1b", 1, 3).ranks
    assert " ".join(map(str, lane)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_chunks_have_a_default() -> None:
    assert [make_order(name, 2, 4).chunks for name in ORDERS] == [1, 1, 2, 1, 2, 2]
    assert make_order("zbv", 4, 4).homes == (0, 1, 2, 3, 3, 2, 1, 0)
    assert make_order("interleaved", 3, 4, 2).homes == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1bb", 2, 4), "unknown schedule; the closest is '1f1b': give one of gpipe, 1f1b, interleaved"),
        ((3, 2, 4), "unknown schedule: give one of"),
        (("1f1b", 0, 4), r"make_order\('1f1b', ...\) cannot be made:\n  ranks=0 is no int of at least 1"),
        (("1f1b", 2, 4.0), "microbatches=4.0 is no int"),
        (
            ("1f1b", 2, 4, 2),
            "chunks=2, .* exactly 1 .*\nGive chunks=1, leave it out, or use one of gpipe, interleaved,",
        ),
        (("interleaved", 2, 4, 1), "chunks=1, .* at least 2 .*\nGive chunks=2, .* one of gpipe, 1f1b, zb_h1"),
        (("zbv", 2, 4, 3), "chunks=3, .* exactly 2 .*\nGive chunks=2, .* one of gpipe, interleaved, zb_h1"),
        (("dualpipev", 2, True, 0), "microbatches=True is no int of at least 1\n  chunks=0 is no int.*\nGive ints of"),
    ],
)
def test_numbers_that_a_schedule_cannot_have(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_order(*arguments)


def test_forwards_and_backwards_of_different_microbatches_alternate() -> None:
    lane = make_order("1f1b", 4, 8).ranks[0]
    assert lane[3:7] == (Action(0, "F", 3), Action(0, "B", 0), Action(0, "F", 4), Action(0, "B", 1))
