"""Transfers are records of one table: a kind that is added there is known everywhere."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Costs, GroupInfo, Link, Op, Policy, Schedule, Transfer, build, check, parse, simulate
from fshard.schedule.ops import op_kinds
from fshard.schedule.simulate import measured
from fshard.schedule.transfers import KINDS, Kind, awaited, started
from tests.schedule.cases import gpt, replicas

TOY = Kind("outer_reduce", "gradient", "staging of outer sums", link="reduces", spare=1)
LATE = Kind("share", "updated", "staging of shares")


@pytest.fixture(params=["gradient", "updated"])
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A kind of transfer that is added in one place."""
    row = TOY if request.param == "gradient" else LATE
    monkeypatch.setitem(KINDS, row.name, row)
    return row


def made(row: Kind, policy: Policy, accumulate: int = 1) -> Schedule:
    """Blocks that have a transfer of this kind at the end of their path."""
    program, groups = gpt(3)
    ends = ("shard", "shard") if row.stage == "gradient" else ("state", "state")
    more = Transfer(row.name, *ends, sent=100, staging=512, axes="outer")
    return build(program, [groups[0], *(extended(group, more) for group in groups[1:])], policy, accumulate)


def extended(group: GroupInfo, transfer: Transfer) -> GroupInfo:
    """The group with one transfer more."""
    return replace(group, transfers=(*group.transfers, transfer))


POLICIES = [Policy(), Policy(0, 1), Policy(update="in_backward"), Policy(accumulation="full", reshard=False)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_new_row_is_built_and_checked(toy: Kind, policy: Policy, accumulate: int) -> None:
    schedule = made(toy, policy, accumulate)
    check(schedule)
    assert {toy.name, toy.wait} <= op_kinds()
    under_way = 0
    for group in schedule.groups[1:]:
        kinds = [op.kind for op in schedule if op.target == group.name]
        assert kinds.count(toy.name) == kinds.count(toy.wait) == 1
        if toy.stage == "gradient":
            last = len(kinds) - kinds[::-1].index("wait reduce_scatter")
            assert kinds[last] == toy.name
            assert policy.update == "deferred" or kinds.index(toy.wait) < kinds.index("update")
        else:
            assert kinds[kinds.index("update") + 1] == toy.name
            assert policy.update != "deferred" or kinds.index(toy.wait) < kinds.index("all_gather")
    for op in schedule:
        under_way += (op.kind == toy.name) - (op.kind == toy.wait)
        assert toy.stage != "gradient" or under_way <= policy.reduces + 1


def test_a_schedule_that_breaks_its_rules_is_refused(toy: Kind) -> None:
    schedule = made(toy, Policy(0, 1, update="in_backward"))
    ops = list(schedule.ops)
    for word in (toy.name, toy.wait):
        at = next(number for number, op in enumerate(ops) if op.kind == word)
        again = [*ops[: at + 1], *ops[at:]]
        without = [*ops[:at], *ops[at + 1 :]]
        early = [ops[0], ops[at], *ops[1:at], *ops[at + 1 :]]
        for broken in (again, without, early):
            with pytest.raises(ScheduleError):
                check(replace(schedule, ops=tuple(broken)))


def test_its_memory_is_accounted(toy: Kind) -> None:
    schedule = made(toy, Policy())
    at = {str(op): number for number, op in enumerate(schedule)}
    item = f"{toy.name}:blocks.1"
    assert schedule.memory.sizes[item] == 512
    assert schedule.memory.lifetimes[item] == ((at[f"{toy.name} blocks.1"], at[f"{toy.wait} blocks.1"]),)


def test_it_is_simulated_and_measured(toy: Kind) -> None:
    schedule = made(toy, Policy(0, 1))
    seconds = {(op.kind, op.target): 1.0 for op in schedule if op.kind in ("forward", "backward")}
    run = simulate(schedule, Costs(seconds, links={"outer": Link(10.0)}))
    spans = [(run.starts[at], run.ends[at]) for at, op in enumerate(schedule) if op.kind == toy.name]
    assert [end - start for start, end in spans] == [10.0] * 3 and run.wire == 30.0 and run.sent == 300
    assert any(op.kind == toy.wait for _, op in run.waits())
    seen = measured(schedule, [float(number) for number in range(len(schedule) + 1)])
    assert seen.sent == 300 and seen.wire > 0
    assert simulate(schedule, Costs({(toy.wait, "blocks.0"): 1.0})).compute == 1.0


def test_it_is_printed_and_parsed(toy: Kind) -> None:
    schedule = made(toy, Policy(), 2)
    text = str(schedule)
    assert parse(text) == schedule and str(parse(text)) == text
    ends = "shard -> shard" if toy.stage == "gradient" else "state -> state"
    assert f"  {toy.name:<14} {ends} sent=100 staging=512 over outer" in text.splitlines()
    assert f"{toy.wait:<19} blocks.1" in text


def test_it_is_drawn(toy: Kind, tmp_path: Path) -> None:
    schedule = made(toy, Policy())
    costs = Costs({(op.kind, op.target): 1.0 for op in schedule if op.kind == "forward"}, Link(100.0))
    for run in (None, simulate(schedule, costs)):
        figure = fs.view.timeline(schedule, run)
        figure.savefig(tmp_path / "step.png", dpi=40)
        assert toy.name in [text.get_text() for text in figure.axes[0].get_yticklabels()]
        legend = figure.axes[1].get_legend()
        assert legend is not None and toy.staging in [text.get_text() for text in legend.get_texts()]


def test_every_kind_has_two_ops() -> None:
    schedule = build(*replicas(), Policy())
    for row in KINDS.values():
        assert started(row.name) is row and awaited(row.wait) is row
        assert started(row.wait) is None and awaited(row.name) is None
    present = {move.kind for group in schedule.groups for move in group.transfers}
    beside = {row.name for row in KINDS.values() if row.stage == "activation"}  # units have them, and no group
    assert beside == {"activation_offload", "activation_fetch"}
    assert present == set(KINDS) - beside - {"offload", "regather", "exchange", "stage_sum", "send", "receive"}
    assert {op.kind for op in schedule if started(op.kind)} == present
    assert {op.kind for op in schedule if awaited(op.kind)} == {KINDS[kind].wait for kind in present}


def test_the_documentation_has_a_row_for_each_kind() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "->" in line]
    assert sorted(rows) == sorted(KINDS) and rows[0] == "all_gather"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: Transfer("gather", "state", "param"), ["'gather' is not a kind of transfer", "all_gather"]),
        (lambda: Transfer("all_gather", "state", "param", sent=-1), ["all_gather: -1 bytes sent"]),
        (lambda: Transfer("exchange", "state", "state"), ["exchange: it runs between steps: give a PeriodicTransfer"]),
        (lambda: Transfer("activation_fetch", "host", "param"), ["activation_fetch: it moves what a unit keeps"]),
        (
            lambda: GroupInfo("a", 1, 1, 1, True, [Transfer(kind, "x", "y") for kind in ("offload", "reduce_scatter")]),  # type: ignore[arg-type]
            ["group 'a': offload, reduce_scatter; the order is update_gather, all_gather, regather, reduce_scatter"],
        ),
        (lambda: GroupInfo("a", 1, 1, 1, True, (Transfer("offload", "x", "y"),) * 2), ["offload, offload"]),
    ],
)
def test_what_cannot_be_a_path_is_refused(bad: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        bad()
    for word in words:
        assert word in str(caught.value)


def test_a_transfer_is_a_value() -> None:
    one = Transfer("all_gather", "state", "param", 3)
    assert one == Transfer("all_gather", "state", "param", 3) and hash(one) == hash(replace(one))
    assert eval(repr(one), {"Transfer": Transfer}) == one
    with pytest.raises(FrozenInstanceError):
        one.sent = 4  # type: ignore[misc]
    assert str(Op(one.row.wait, "blocks.3")) == "wait all_gather blocks.3"
