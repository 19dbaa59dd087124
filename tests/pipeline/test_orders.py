"""Orders print and parse back, and refuse parts that do not belong together."""

import pytest

from fshard.errors import PlanError, ScheduleError
from fshard.pipeline import Action, PipelineOrder, make_order, parse

TEXT = """pipeline 1f1b
homes 0 1 2
rank 0  0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
rank 1      1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""


def test_the_text_has_a_lane_a_rank_in_columns_of_time() -> None:
    assert str(make_order("1f1b", 3, 4)) == TEXT


@pytest.mark.parametrize("name", ["1f1b", "two words", 'quo"ted', "#"])
def test_text_parses_back(name: str) -> None:
    ranks = make_order("zb_h1", 3, 11).ranks
    order = PipelineOrder(name, (0, 1, 2), ranks)
    assert parse(str(order)) == order
    assert hash(parse(str(order))) == hash(order)


def test_ranks_of_two_digits_and_ranks_without_actions() -> None:
    order = make_order("interleaved", 11, 12, chunks=2)
    assert parse(str(order)) == order
    assert len({line.index("F") for line in str(order).split("\n") if line.startswith("rank")}) == 11
    empty = PipelineOrder("empty", (1,), ((), (Action(0, "F", 0), Action(0, "B", 0))))
    assert parse(str(empty)) == empty


def test_actions_that_can_never_run_are_printed_too() -> None:
    stuck = PipelineOrder("stuck", (0, 1), ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0),)))
    assert str(stuck).split("\n")[2:4] == ["rank 0  0F0 0B0", "rank 1  1B0"]
    assert parse(str(stuck)) == stuck


def test_sizes() -> None:
    order = make_order("zbv", 4, 9)
    assert (order.stages, order.microbatches, order.chunks) == (8, 9, 2)
    assert repr(order) == "<PipelineOrder zbv, 8 stages on 4 ranks, 9 microbatches>"


@pytest.mark.parametrize(
    ("stage", "kind", "microbatch"), [(0, "X", 0), (0, "f", 0), (-1, "F", 0), (0, "F", True), (0, "F", 1.0)]
)
def test_bad_actions(stage: int, kind: str, microbatch: int) -> None:
    with pytest.raises(PlanError, match=r"ints of at least 0, and the kind is one of F, B, I, W"):
        Action(stage, kind, microbatch)


@pytest.mark.parametrize(
    ("name", "homes", "ranks", "words"),
    [
        ("", (0,), ((),), "name='' is no name"),
        ("x", (), ((),), "0 stages on 1 ranks"),
        ("x", (0, 2), ((), ()), "stage 1 is on rank 2 of 2"),
        ("x", (True,), ((), ()), "stage 0 is on rank True of 2"),
    ],
)
def test_parts_that_do_not_belong_together(name: str, homes: tuple[int, ...], ranks: tuple[()], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PipelineOrder(name, homes, ranks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 .* is over before a line 'rank 0'"),
        ("pipeline x\nhomes 0", "line 2 .* is over before a line 'rank 0'"),
        ("homes 0", "line 1 .* a line 'pipeline NAME' is due"),
        ("pipeline x y", "a line 'pipeline NAME' is due"),
        ("pipeline x\nrank 0", r"line 2 .* a line 'homes NUMBER \.\.\.' is due"),
        ("pipeline x\nhomes z", "'z' is not of the form NUMBER"),
        ("pipeline x\nhomes 0\nrank 1", "line 3 .* the line of rank 0 is due"),
        ("pipeline x\nhomes 0\nrank 0 0F0 0X0", "'0X0' is no action: write stage, kind"),
        ("pipeline x\nhomes 0\nrank 0 F0", "'F0' is no action"),
        ("pipeline x\nhomes 0\nrank 0\nlane 1", "line 4 .* a line 'rank NUMBER ...' is due"),
    ],
)
def test_unreadable_text(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        parse(text)


def test_comments_and_blanks_do_not_count() -> None:
    order = parse("# mine\n\npipeline x # a comment\nhomes 0\n  rank 0    0F0  0B0  # over\n")
    assert order == PipelineOrder("x", (0,), ((Action(0, "F", 0), Action(0, "B", 0)),))
