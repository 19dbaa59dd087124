"""The checker against broken schedules: every one that breaks a rule is refused, and only those."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.schedule import Op, Policy, Schedule, ScheduleMemory, build, check, parse
from tests.schedule.cases import CASES, POLICIES, gpt, recipes
from tests.schedule.statements import valid

SUBJECTS = [
    (case, policy, accumulate, train)
    for case, policy, accumulate, train in [
        ("gpt", POLICIES[0], 1, True),
        ("gpt", POLICIES[0], 1, False),
        ("encoder_decoder", POLICIES[1], 1, True),
        ("mixed", POLICIES[0], 2, True),
        ("mixed", POLICIES[4], 2, True),
        ("mixed", POLICIES[3], 1, False),
        ("twice", POLICIES[2], 2, True),
        ("twice", POLICIES[5], 2, True),
        ("tied", POLICIES[3], 2, True),
        ("replicas", POLICIES[0], 1, True),
        ("replicas", POLICIES[4], 2, True),
        ("nothing", POLICIES[0], 1, True),
    ]
]


def passes(schedule: Schedule) -> bool:
    """Whether ``check`` accepts it."""
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def subject(case: str, policy: Policy, accumulate: int, train: bool) -> Schedule:
    """A valid schedule."""
    return build(*CASES[case](), policy, accumulate, train)


def with_ops(schedule: Schedule, ops: list[Op]) -> Schedule:
    """The same with other ops."""
    return replace(schedule, ops=tuple(ops))


def edits(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every op duplicated, swapped with the next, moved to the end, changed."""
    ops = list(schedule.ops)
    for i, op in enumerate(ops):
        yield f"{i} twice", with_ops(schedule, [*ops[:i], op, *ops[i:]])
        yield f"{i} again at the end", with_ops(schedule, [*ops[:-1], op, ops[-1]])
        yield f"{i} moved to the end", with_ops(schedule, [*ops[:i], *ops[i + 1 : -1], op, *ops[i + 1 :][-1:]])
        if i + 1 < len(ops):
            yield f"{i} swapped", with_ops(schedule, [*ops[:i], ops[i + 1], op, *ops[i + 2 :]])
        for changed in (replace(op, index=op.index + 1), replace(op, microbatch=op.microbatch + 1)):
            yield f"{i} becomes {changed}", with_ops(schedule, [*ops[:i], changed, *ops[i + 1 :]])


@pytest.mark.parametrize(("case", "policy", "accumulate", "train"), SUBJECTS)
def test_no_op_can_be_left_out(case: str, policy: Policy, accumulate: int, train: bool) -> None:
    schedule = subject(case, policy, accumulate, train)
    for i in range(len(schedule)):
        assert not passes(with_ops(schedule, [*schedule.ops[:i], *schedule.ops[i + 1 :]])), schedule[i]


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(("case", "policy", "accumulate", "train"), SUBJECTS)
def test_edits_pass_only_if_still_valid(case: str, policy: Policy, accumulate: int, train: bool) -> None:
    for name, edited in edits(subject(case, policy, accumulate, train)):
        assert passes(edited) == valid(edited), f"{name}\n{edited}"


@given(recipes(most=4), st.data())
def test_random_edits_pass_only_if_still_valid(recipe: Any, data: st.DataObject) -> None:
    schedule = build(*recipe)
    ops = list(schedule.ops)
    for _ in range(data.draw(st.integers(1, 2))):
        i = data.draw(st.integers(0, len(ops) - 1))
        j = data.draw(st.integers(0, len(ops) - 1))
        op, other = ops[i], ops[j]
        del ops[i]
        match data.draw(st.sampled_from(("move", "copy", "steal"))):
            case "move":
                ops.insert(j, op)
            case "copy":
                ops[i:i] = [op]
                ops.insert(j, op)
            case "steal":
                ops.insert(i, replace(op, target=other.target, microbatch=other.microbatch))
    edited = with_ops(schedule, ops)
    assert passes(edited) == valid(edited), str(edited)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            Op("wait all_gather", "blocks.1"),
            None,
            ["blocks.1 reads blocks.1, which was not waited for since its all-gather"],
        ),
        (Op("all_gather", "blocks.1"), None, ["no all_gather of blocks.1 is under way"]),
        (Op("free", "blocks.1"), None, ["blocks.1 must be free: no compute within prefetch=1 reads it"]),
        (Op("reduce_scatter", "blocks.1"), None, ["no reduce_scatter of blocks.1 of microbatch 0 is under way"]),
        (Op("wait reduce_scatter", "blocks.3"), None, ["1 reduce_scatter are under way; reduces=1"]),
        (Op("wait reduce_scatter", "root"), None, ["reduce_scatter of root is not over"]),
        (Op("free", "root"), None, ["root is gathered here and never freed"]),
        (Op("update", "blocks.1"), None, ["blocks.1 is gathered before its pending update"]),
        (Op("consensus"), None, ["consensus must be the last op of a train step"]),
        (Op("handshake"), None, ["handshake must be the first op"]),
        (Op("forward", "blocks.2"), None, ["the program has 'forward blocks.2' here"]),
        (Op("forward", "blocks.2"), Op("forward", "blocks.7"), ["'blocks.7' is not a unit of this schedule"]),
        (Op("all_gather", "blocks.2"), Op("all_gather", "x"), ["'x' is not a group of this schedule"]),
        (
            Op("all_gather", "blocks.2"),
            Op("fetch", "blocks.2"),
            ["'fetch' is none of activation_fetch, activation_offload, all"],
        ),
        (Op("all_gather", "blocks.2"), Op("all_gather", "blocks.2", 1), ["all_gather has no call index"]),
        (Op("all_gather", "blocks.2"), Op("all_gather", "blocks.2", 0, 1), ["all_gather has no microbatch"]),
    ],
)
def test_the_message_says_what_is_wrong_and_where(old: Op, new: Op | None, words: list[str]) -> None:
    schedule = build(*gpt(), Policy(1, 1))
    at = schedule.ops.index(old)
    broken = with_ops(schedule, [*schedule.ops[:at], *([new] if new else []), *schedule.ops[at + 1 :]])
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    for word in words:
        assert word in str(caught.value)
    marked = [line for line in str(caught.value).splitlines() if line.startswith("  ->")]
    assert len(marked) == 1


def test_the_message_shows_the_op_among_its_neighbours() -> None:
    schedule = build(*gpt(2), Policy(1, 1))
    at = schedule.ops.index(Op("wait all_gather", "blocks.1"))
    with pytest.raises(ScheduleError) as caught:
        check(with_ops(schedule, [*schedule.ops[:at], *schedule.ops[at + 1 :]]))
    assert str(caught.value) == (
        "this schedule cannot run: blocks.1 reads blocks.1, which was not waited for since its all-gather\n"
        "        7 update              blocks.1\n"
        "        8 all_gather          blocks.1\n"
        "        9 wait all_gather     blocks.0\n"
        "       10 forward             blocks.0\n"
        "  ->   11 forward             blocks.1\n"
        "       12 backward            blocks.1\n"
        "       13 free                blocks.1\n"
        "       14 reduce_scatter      blocks.1\n"
        "       15 backward            blocks.0\n"
        "Build the schedule again from its program, or undo the changes to its text."
    )


def test_a_parsed_schedule_is_held_to_its_policy() -> None:
    text = str(build(*gpt(), Policy(prefetch=2))).replace("prefetch=2", "prefetch=1")
    with pytest.raises(ScheduleError, match="blocks.1 is read 2 computes ahead; prefetch=1"):
        check(parse(text))


def test_no_ops_at_all() -> None:
    with pytest.raises(ScheduleError, match="there are no ops at all"):
        check(with_ops(build(*gpt(), Policy()), []))


@pytest.mark.parametrize("shift", [-256, 256, 10**9])
def test_ranges_that_overlap_or_leave_the_arena(shift: int) -> None:
    schedule = build(*gpt(), Policy())
    memory = schedule.memory
    broken: list[ScheduleMemory] = []
    for item in memory.offsets:
        offsets = {**memory.offsets, item: memory.offsets[item] + shift}
        broken.append(replace(memory, offsets=offsets))
    refused = []
    for planned in broken:
        object.__setattr__(schedule, "memory", planned)  # what a wrong packing would have cached there
        refused.append(not passes(schedule))
    assert any(refused) if abs(shift) == 256 else all(refused)
