"""Steps of several passes: any of them is built right, and the checker knows right from wrong."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.schedule import Op, Pass, Policy, Schedule, StepProgram, build, check, parse
from fshard.schedule.policy import keep
from tests.schedule.cases import info
from tests.schedule.stage_cases import STEPS, chain, sam, steps, surgery
from tests.schedule.stage_statements import valid
from tests.schedule.test_check import edits, passes, with_ops

POLICIES = [
    Policy(),
    Policy(prefetch=0, reduces=1),
    Policy(prefetch=5, reduces=3, reshard=False),
    Policy(prefetch=1, reduces=1, reshard=keep(last=1), accumulation="full"),
]


@pytest.mark.long
@given(steps())
def test_any_step_passes_check_and_every_statement(recipe: Any) -> None:
    schedule = build(*recipe)
    check(schedule)
    assert valid(schedule)


@pytest.mark.long
@given(steps())
def test_any_step_can_be_printed_and_read(recipe: Any) -> None:
    schedule = build(*recipe)
    again = parse(str(schedule))
    assert again == schedule and str(again) == str(schedule) and again.hash == schedule.hash


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("case", STEPS)
def test_no_op_can_be_left_out(case: str, policy: Policy) -> None:
    if case == "locals_alone" and policy.reshard not in (True, False):
        policy = replace(policy, reshard=True)
    schedule = build(*STEPS[case](), policy)
    check(schedule)
    for i in range(len(schedule)):
        assert not passes(with_ops(schedule, [*schedule.ops[:i], *schedule.ops[i + 1 :]])), schedule[i]


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
@pytest.mark.parametrize("case", STEPS)
def test_edits_pass_only_if_still_valid(case: str, policy: Policy) -> None:
    for name, edited in edits(build(*STEPS[case](), policy)):
        assert passes(edited) == valid(edited), f"{name}\n{edited}"


@pytest.mark.long
@given(steps(), st.data())
def test_random_edits_pass_only_if_still_valid(recipe: Any, data: st.DataObject) -> None:
    schedule = build(*recipe)
    ops = list(schedule.ops)
    for _ in range(data.draw(st.integers(1, 2))):
        i, j = (data.draw(st.integers(0, len(ops) - 1)) for _ in range(2))
        op, other = ops[i], ops[j]
        match data.draw(st.sampled_from(("move", "copy", "steal", "drop", "swap"))):
            case "move":
                ops.insert(j, ops.pop(i))
            case "copy":
                ops.insert(j, op)
            case "steal":
                ops[i] = replace(op, target=other.target, microbatch=other.microbatch)
            case "drop" if len(ops) > 1:
                del ops[i]
            case "swap":
                ops[i], ops[j] = other, op
    edited = with_ops(schedule, ops)
    assert passes(edited) == valid(edited), str(edited)


def moved(schedule: Schedule, op: Op, before: Op) -> Schedule:
    """The same with one op before another."""
    ops = [each for each in schedule.ops if each != op]
    return with_ops(schedule, [*ops[: ops.index(before)], op, *ops[ops.index(before) :]])


@pytest.mark.parametrize(
    ("op", "before", "words"),
    [
        (Op("all_gather", "a.moved"), Op("local"), "a.moved is gathered before local 0 makes it"),
        (
            Op("wait reduce_scatter", "a"),
            Op("forward", "root", 0, 1),
            "'local' reads the gradient of a: reduce_scatter of",
        ),
        (Op("update", "b"), Op("all_gather", "a.moved"), "b is gathered before its pending update"),
        (Op("local"), Op("forward", "a", 0, 1), "a.moved is gathered before local 0 makes it"),
        (Op("forward", "a", 0, 1), Op("local"), "the program has 'local' here"),
        (Op("reduce_scatter", "a"), Op("backward", "a"), "'backward a' must come before"),
        (Op("reduce_scatter", "b.moved", 0, 1), Op("backward", "b", 0, 1), "'backward b @1' must come before"),
    ],
)
def test_the_message_says_what_is_wrong(op: Op, before: Op, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(moved(build(*sam(), Policy(1, 1)), op, before))
    assert words in str(caught.value)


def test_a_local_finds_its_updates() -> None:
    stages, groups = STEPS["locals_alone"]()
    schedule = build(stages, groups, Policy())
    assert [str(op) for op in schedule] == [
        "handshake", "update a", "update_gather a", "update b", "wait update_gather a", "local", "local #1",
        "consensus",
    ]  # fmt: skip
    for op, words in (
        (Op("update", "a"), "a is sent before its update"),
        (Op("wait update_gather", "a"), "'local' reads a before the ranges that other ranks updated are there"),
    ):
        with pytest.raises(ScheduleError, match=words):
            check(moved(schedule, op, Op("local", "", 1)))


def test_a_gradient_is_not_replaced_before_the_update_that_reads_it() -> None:
    stages, groups = surgery()
    schedule = build(replace(stages, updates={0: 1}), groups, Policy(1, 1))
    check(schedule)
    other = build(replace(stages, updates={}), groups, Policy(1, 1))
    late = with_ops(other, [*other.ops[:-1], Op("update", "a"), other.ops[-1]])
    with pytest.raises(ScheduleError, match="a has no pending update"):
        check(late)
    # Nothing reads b, whose update needs the gradient that the second pass fills.
    apart = [*groups, replace(groups[0], name="b", trainable=False, transfers=(), grad_bytes=0)]
    schedule = build(replace(stages, updates={0: 0, 2: 1}), apart, Policy(1, 1))
    check(schedule)
    with pytest.raises(ScheduleError, match="b's pending update needs the gradient that this one replaces"):
        check(moved(schedule, Op("update", "b"), Op("backward", "root", 0, 1)))


def test_a_reduction_of_another_pass() -> None:
    schedule = build(*surgery(), Policy(1, 1))
    ops = [replace(op, microbatch=1) if op == Op("reduce_scatter", "a") else op for op in schedule.ops]
    with pytest.raises(ScheduleError, match="microbatch 0 is running"):
        check(with_ops(schedule, ops))
    first = next(i for i, op in enumerate(schedule) if op == Op("reduce_scatter", "a.second", 0, 1))
    again = [*schedule.ops[:first], Op("reduce_scatter", "a", 0, 1), *schedule.ops[first:]]
    with pytest.raises(ScheduleError, match="a's gradient is filled in microbatches 0 to 0"):
        check(with_ops(schedule, again))


def test_an_update_comes_before_the_gradient_that_it_reads_is_filled() -> None:
    groups = [info("a"), info("b", trainable=False)]
    stages = StepProgram((Pass(chain(0)), Pass(chain(1))), {1: 0})
    schedule = build(stages, groups, Policy(0, 1))
    check(schedule)
    at = schedule.ops.index(Op("update", "b"))
    assert schedule[at + 1] == Op("backward", "a")
    with pytest.raises(ScheduleError, match="b's pending update needs the gradient that this one replaces"):
        check(moved(schedule, Op("update", "b"), Op("backward", "root")))
