"""Schedules as built: goldens, the rule word for word, and what special programs must lead to.

``FSHARD_REGEN_GOLDENS=1 pytest tests/schedule/test_build.py`` writes the golden texts anew; read the diff.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given

from fshard.errors import PlanError
from fshard.schedule import Call, GroupInfo, Op, Policy, Program, Schedule, build, check, parse
from fshard.schedule.policy import keep
from tests.schedule.cases import (
    CASES,
    POLICIES,
    encoder_decoder,
    gpt,
    info,
    mixed,
    naive,
    program,
    recipes,
    replicas,
)
from tests.schedule.statements import valid

GOLDENS = Path(__file__).parent / "goldens"

PINNED = {
    "gpt4_prefetch0": lambda: build(*gpt(), Policy(0, 1)),
    "gpt4_prefetch1": lambda: build(*gpt(), Policy(1, 1)),
    "gpt4_prefetch2": lambda: build(*gpt(), Policy()),
    "gpt4_keep": lambda: build(*gpt(), Policy(1, 1, reshard=False)),
    "gpt2_accumulate3": lambda: build(*gpt(2), Policy(1, 1), accumulate=3),
    "gpt4_beside": lambda: build(*gpt(), Policy(1, 1, update="beside")),
    "gpt2_in_backward": lambda: build(*gpt(2), Policy(1, 1, update="in_backward"), accumulate=2),
    "gpt4_keep_last": lambda: build(*gpt(), Policy(0, 1, reshard=keep(last=2))),
    "gpt2_accumulate_full": lambda: build(*gpt(2), Policy(1, 1, accumulation="full"), accumulate=2),
    "gpt4_eval": lambda: build(*gpt(), Policy(1, 1), train=False),
    "encoder_decoder": lambda: build(*encoder_decoder(), Policy(1, 1)),
    "mixed": lambda: build(*mixed(), Policy(1, 1)),
    "replicas": lambda: build(*replicas(), Policy(1, 1), accumulate=2),
}


def texts(schedule: Schedule, *kinds: str) -> list[str]:
    """The ops of these kinds, as text."""
    return [str(op) for op in schedule if op.kind in kinds]


@pytest.mark.parametrize("name", PINNED)
def test_golden(name: str) -> None:
    path, schedule = GOLDENS / f"{name}.txt", PINNED[name]()
    if os.environ.get("FSHARD_REGEN_GOLDENS") == "1":
        GOLDENS.mkdir(exist_ok=True)
        path.write_text(str(schedule), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert str(schedule) == text
    assert parse(text) == schedule
    check(parse(text))


@given(recipes())
def test_any_program_leads_to_the_rule_and_passes_check(recipe: Any) -> None:
    schedule = build(*recipe)
    assert schedule.ops == naive(*recipe)
    check(schedule)
    assert valid(schedule)


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_cases_pass_check(case: str, policy: Policy, accumulate: int) -> None:
    for train in (True, False):
        recipe = (*CASES[case](), policy, accumulate, train)
        assert build(*recipe).ops == naive(*recipe)
        check(build(*recipe))


def test_a_unit_called_twice_reduces_once_after_its_last_backward() -> None:
    schedule = build(*CASES["twice"](), Policy(prefetch=0))
    assert texts(schedule, "forward", "backward", "reduce_scatter") == [
        "forward root", "forward a", "forward b", "forward a #1",
        "backward a #1", "backward b", "reduce_scatter b", "backward a", "reduce_scatter a", "backward root",
    ]  # fmt: skip


def test_a_call_without_backward_is_not_gathered_for_it_and_still_reduces_zeros() -> None:
    made = program(("a", "b"), {"a": (0,), "b": (1,)}, skipped=[Call("a")])
    schedule = build(made, [info("a"), info("b")], Policy(prefetch=0))
    assert texts(schedule, "all_gather").count("all_gather a") == 1
    assert texts(schedule, "backward", "reduce_scatter") == [
        "backward b",
        "reduce_scatter b",
        "backward root",
        "reduce_scatter a",
    ]


def test_a_shared_group_is_reduced_after_the_last_of_its_readers() -> None:
    schedule = build(*CASES["shared"](), Policy(prefetch=0))
    assert texts(schedule, "reduce_scatter") == ["reduce_scatter b", "reduce_scatter shared", "reduce_scatter a"]
    assert texts(schedule, "all_gather").count("all_gather shared") == 1  # its readers are neighbours


def test_a_group_of_root_and_a_unit_stays_and_is_reduced_with_root() -> None:
    schedule = build(*CASES["tied"](), Policy(), accumulate=2)
    assert texts(schedule, "all_gather", "free").count("all_gather tied") == 1
    ops = texts(schedule, "backward", "reduce_scatter", "free")
    assert ops.index("reduce_scatter tied") > ops.index("backward root")


def test_frozen_groups_are_gathered_for_backward_and_nothing_else() -> None:
    made = program(("a", "b", "c"), {"a": (0,), "b": (1,), "c": (2,)})
    schedule = build(made, [info("a", trainable=False), info("b"), info("c")], Policy(prefetch=0))
    mine = [op.kind for op in schedule if op.target == "a" and op.kind not in ("forward", "backward")]
    assert mine == ["all_gather", "wait all_gather", "free"] * 2


def test_groups_nobody_reads_are_updated_first_and_reduced_last() -> None:
    schedule = build(program(("a",), {"a": (0,)}), [info("a"), info("idle")], Policy())
    assert texts(schedule, "update") == ["update idle", "update a"]
    assert texts(schedule, "reduce_scatter", "backward")[-2:] == ["backward root", "reduce_scatter idle"]
    assert not [op for op in schedule if op.target == "idle" and op.kind in ("all_gather", "wait all_gather", "free")]


def test_a_world_of_one_neither_gathers_nor_reduces() -> None:
    made, groups = gpt(2)
    alone = [info(group.name, gathered=False, reduced=False) for group in groups]
    schedule = build(made, alone, Policy(), accumulate=2)
    assert {op.kind for op in schedule} == {"handshake", "update", "forward", "backward", "consensus"}
    assert schedule.memory.arena_bytes == 0
    late = build(made, alone, Policy(1, 1, update="in_backward"), accumulate=2)
    assert texts(late, "update", "backward")[-5:] == [
        "backward blocks.1 @1", "update blocks.1", "backward blocks.0 @1", "update blocks.0", "backward root @1",
        "update root",
    ][-5:]  # fmt: skip


def test_eval_runs_forward_and_marks_where_root_ends() -> None:
    schedule = build(*gpt(2), Policy(), train=False)
    assert {op.kind for op in schedule} == {"handshake", "all_gather", "wait all_gather", "forward", "backward", "free"}
    assert texts(schedule, "backward", "free")[-2:] == ["backward root", "free root"]
    assert schedule.program.backward == ()


def test_without_reshard_each_group_is_gathered_once_a_step() -> None:
    schedule = build(*gpt(), Policy(reshard=False), accumulate=3)
    assert len(texts(schedule, "all_gather")) == len(set(texts(schedule, "all_gather"))) == 5


def test_kept_units_are_gathered_once_a_step() -> None:
    made, groups = gpt(6)
    for policy, names in (
        (Policy(0, reshard=keep(last=2)), ["blocks.4", "blocks.5"]),
        (Policy(0, reshard=keep("blocks.[12]", "blocks.4")), ["blocks.1", "blocks.2", "blocks.4"]),
        (Policy(0, reshard=keep(last=99)), [group.name for group in groups]),
    ):
        gathers = texts(build(made, groups, policy, accumulate=2), "all_gather")
        once = [group.name for group in groups if gathers.count(f"all_gather {group.name}") == 1]
        assert once == list(dict.fromkeys(["root", *names]))


def test_the_turn_to_the_backward_gathers_nothing_that_was_there() -> None:
    made, groups = gpt(6, root=0)
    for ahead in range(5):
        schedule = build(made, groups, Policy(prefetch=ahead))
        gathers = texts(schedule, "all_gather")
        again = [group.name for group in groups if gathers.count(f"all_gather {group.name}") == 2]
        assert again == [f"blocks.{i}" for i in range(5 - ahead)]
        assert schedule.memory.peak(schedule.ops.index(Op("forward", "blocks.5"))) <= (ahead + 1) * 2**20


def test_full_accumulation_reduces_in_the_last_microbatch_alone() -> None:
    schedule = build(*gpt(3), Policy(accumulation="full"), accumulate=4)
    assert [op.microbatch for op in schedule if op.kind in ("reduce_scatter", "wait reduce_scatter")] == [3] * 8
    spans = schedule.memory.lifetimes["grad:blocks.1"]
    assert spans == (
        (
            schedule.ops.index(Op("backward", "blocks.1")),
            schedule.ops.index(Op("wait reduce_scatter", "blocks.1", 0, 3)),
        ),
    )
    full, sharded = (build(*gpt(9), Policy(1, 1, accumulation=a), 4).memory.peak_bytes for a in ("full", "sharded"))
    assert full > 1.3 * sharded
    assert build(*gpt(3), Policy(accumulation="full")).ops == build(*gpt(3), Policy()).ops


def test_root_stays_for_the_step() -> None:
    schedule = build(*gpt(), Policy(prefetch=0), accumulate=3)
    assert texts(schedule, "all_gather").count("all_gather root") == 1
    assert [op for op in schedule if op.target == "root" and op.kind == "free"] == [Op("free", "root")]


@pytest.mark.parametrize(("reduces", "most"), [(1, 1), (2, 2), (50, 5)])
def test_reduces_in_flight(reduces: int, most: int) -> None:
    schedule = build(*gpt(), Policy(reduces=reduces), accumulate=3)
    flying = peak = 0
    for op in schedule:
        flying += (op.kind == "reduce_scatter") - (op.kind == "wait reduce_scatter")
        peak = max(peak, flying)
    assert peak == most


def test_in_backward_updates_follow_the_last_collect() -> None:
    schedule = build(*gpt(), Policy(1, 1, update="in_backward"), accumulate=2)
    for at, op in enumerate(schedule):
        if op.kind == "update":
            assert schedule[at - 1] == Op("wait reduce_scatter", op.target, 0, 1)


def test_a_schedule_is_a_sequence_and_a_value() -> None:
    schedule = build(*gpt(2), Policy())
    assert schedule[0] == Op("handshake") and schedule[-1] == Op("consensus") and schedule[1:3] == schedule.ops[1:3]
    assert len(schedule) == len(list(schedule)) == len(schedule.ops)
    again = build(*gpt(2), Policy())
    assert schedule == again and hash(schedule) == hash(again) and schedule.hash == again.hash
    assert schedule.hash != build(*gpt(2), Policy(prefetch=1)).hash
    assert repr(schedule) == (
        f"<Schedule train, {len(schedule)} ops, 3 groups, 2 calls, accumulate=1, "
        "prefetch=2 reduces=2 reshard=true update=deferred>"
    )


def test_the_order_of_reads_does_not_matter() -> None:
    one = Program(calls_ := (Call("a"), Call("b")), calls_[::-1], {"b": (1,), "a": (0,), "z": (), "y": ()})
    two = Program(calls_, calls_[::-1], {"root": (), "y": (), "a": (0,), "z": (), "b": (1,)})
    groups = [info("a"), info("b")]
    assert one == two and build(one, groups, Policy()).hash == build(two, groups, Policy()).hash


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: Policy(prefetch=-1, reduces=-1), ["prefetch=-1 is less than 0", "reduces=-1 is less than 0"]),
        (lambda: Policy(prefetch=True), ["prefetch=True is of type bool, not int"]),
        (lambda: Policy(reduces=1.0), ["reduces=1.0 is of type float"]),  # type: ignore[arg-type]
        (lambda: Policy(reshard=1), ["reshard=1 is of type int, not bool"]),  # type: ignore[arg-type]
        (lambda: Policy(reshard="a", accumulation="b"), ["'a'", "fs.keep", "accumulation='b'", "'full'"]),  # type: ignore[arg-type]
        (lambda: keep(), ["keeps nothing"]),
        (lambda: keep("", 3, last=-1), ["'' is not a pattern", "3 is not a pattern", "last=-1"]),  # type: ignore[arg-type]
        (lambda: build(*gpt(2), Policy(reshard=keep("block.*", "x"))), ["'block.*' matches none", "'x'", "blocks.0, "]),
        (lambda: Policy(update="late"), ["update='late'", "'deferred', 'beside', 'in_backward'"]),
        (lambda: Program((Call("a", 1),), (), {"a": ()}), ["'a #1'", "call #0"]),
        (lambda: Program((Call("a"),), (), {}), ["'a' is called, but reads"]),
        (lambda: Program((Call("root"),), (), {"root": ()}), ["named 'root'"]),
        (lambda: Program((Call(""),), (), {"": ()}), ["empty name"]),
        (lambda: Program((), (Call("a"),), {"a": ()}), ["backward holds 'a', forward does not"]),
        (lambda: Program((Call("a"),), (Call("a"),) * 2, {"a": ()}), ["backward holds 'a' twice"]),
        (lambda: Program((), (), {"a": (0, 0, -1)}), ["reads group 0 twice", "group -1, which is negative"]),
        (lambda: info(""), ["a name and sizes >= 0"]),
        (lambda: GroupInfo("a", -1, 0, 0, True), ["'a'", "-1"]),
        (lambda: build(Program((), (), {"root": (1,)}), [info("a")], Policy()), ["'root' reads group 1", "1 groups"]),
        (lambda: build(Program((), (), {}), [info("a"), info("a")], Policy()), ["2 groups have the name 'a'"]),
        (lambda: build(*gpt(), Policy(), accumulate=0), ["accumulate=0"]),
    ],
)
def test_what_cannot_be_is_refused(bad: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        bad()
    for word in words:
        assert word in str(caught.value)


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python some work executes: its time, on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.long
@pytest.mark.parametrize("policy", [Policy(), Policy(reshard=False), Policy(prefetch=8, reduces=8)], ids=str)
def test_work_is_linear_in_units(policy: Policy) -> None:
    for name, work in {
        "build": lambda made, groups: build(made, groups, policy, 2),
        "check": lambda made, groups: check(build(made, groups, policy, 2)),
        "text": lambda made, groups: parse(str(build(made, groups, policy, 2))),
    }.items():
        small, large = (lines_run(lambda n=n, work=work: work(*gpt(n))) for n in (60, 240))  # type: ignore[misc]
        assert large < 5 * small, f"{name}: {small} lines for 60 units, {large} for 240"
