"""PyTorch's CSV files are read, and cells that are wrong are named by row and column."""

import pytest

from fshard.errors import ScheduleError
from fshard.pipeline import check_order, make_order, parse_csv
from tests.pipeline.facts import DUAL_PIPE_V, ZB_COMPUTE, ZB_MESSAGES, cells, rows


def test_zero_bubble_on_two_ranks_of_two_stages() -> None:
    order = parse_csv(cells(ZB_COMPUTE), "zb_h1")
    check_order(order)
    assert order == make_order("zb_h1", 2, 8, chunks=2)


def test_its_messages_are_consistent_and_dropped() -> None:
    """Where an I and its W follow one another, the file has a B."""
    order = parse_csv(cells(ZB_MESSAGES), "zb_h1")
    check_order(order)
    assert [list(map(str, lane)) for lane in order.ranks] == [
        [word for word in row if word[1] not in "<>"] for row in rows(ZB_MESSAGES)
    ]
    merged = [" ".join(map(str, lane)) for lane in make_order("zb_h1", 2, 8, chunks=2).ranks]
    for stage in (0, 2):
        for number in range(8):
            merged[0] = merged[0].replace(f"{stage}I{number} {stage}W{number}", f"{stage}B{number}")
    assert [" ".join(map(str, lane)) for lane in order.ranks] == merged


def test_dual_pipe_v_on_four_ranks() -> None:
    order = parse_csv(cells(DUAL_PIPE_V), "dualpipev")
    check_order(order)
    assert order == make_order("dualpipev", 4, 10)


def test_other_cells_are_dropped() -> None:
    text = "0UNSHARD, 0F0 ,,(0F1;0B0)OVERLAP_F_B,0RESHARD,0B1,0REDUCE_GRAD\r\n"
    assert parse_csv(text) == parse_csv("0F0,0F1,0B0,0B1")


def test_ranks_without_cells() -> None:
    assert parse_csv("\n0F0,0B0\n").homes == (1,)


GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0B0", "0X0", r"row 1 \(rank 0\), column 4, '0X0': unknown action: the known ones are F, B, I, W, SEND_F"),
        ("0B0", "B0", "column 4, 'B0': unknown action"),
        ("0B0", "(0F1;0SEND_F1)OVERLAP_F_B", "unknown action"),
        ("0B0", "(0F1;0B0", r"'\(0F1;0B0': unknown action"),
        ("0B0", "0B", "'0B': B has a microbatch: the known ones"),
        ("0B0", "0UNSHARD1", "UNSHARD has no microbatch"),
        ("0B0", "0B0,1F1", r"row 2 .*, column 2, '1F0': stage 1 is on rank 0, where '1F1' is in column 5"),
        ("0B0", "0B0,3UNSHARD", r"column 5, '3UNSHARD': stage 3 is not among 2 stages, and this is rank 0"),
        ("0B0", "0B0,1REDUCE_GRAD", "'1REDUCE_GRAD': stage 1 is on rank 1, and this is rank 0"),
        ("1RECV_F0,1F0,1B0,1SEND_B0", "2F0", "there is no action of stage 1: give a row a rank"),
        (GOOD, "", "there is no action of stage 0"),
        ("0SEND_F0,", "", "column 1, '0F0': 0SEND_F0 is due after it, on the same rank, and is not there"),
        ("1RECV_F0,", "", "row 2 .*, column 1, '1F0': 1RECV_F0 is due before it, on the same rank, and is not there"),
        ("1SEND_B0", "", "'1B0': 1SEND_B0 is due after it, on the same rank, and is not there"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "'0F0': 0SEND_F0 is due after it, on the same rank, and is in column 1"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "'0B0': 0RECV_B0 is due before it, on the same rank, and is in column 4"),
        ("0B0", "0B0,0SEND_F0", "'0SEND_F0': the same is in column 2"),
        ("0B0", "0B0,0SEND_B0", "'0SEND_B0': no action of another rank needs this message"),
        ("0B0", "0B0,0RECV_F0", "'0RECV_F0': no action of another rank needs this receive"),
        ("1B0,", "", "'0B0': it needs a B or I of stage 1 for microbatch 0, and no row has one"),
    ],
)
def test_wrong_cells(old: str, new: str, words: str) -> None:
    parse_csv(GOOD)
    with pytest.raises(ScheduleError, match=words):
        parse_csv(GOOD.replace(old, new))
