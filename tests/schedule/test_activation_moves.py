"""Moves of activations in schedules: where they stand, what is refused, how they print, and what they take."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Call, Costs, Op, Policy, Program, Schedule, build, check, parse, simulate
from fshard.schedule.activation_moves import hosted_calls
from fshard.schedule.footprint import Need, footprint
from tests.schedule.cases import gpt

MOVES = ("activation_offload", "wait activation_offload", "activation_fetch", "wait activation_fetch")


def program(layers: int, ahead: int) -> Program:
    """Blocks, all of which keep their activations on the host."""
    made, _ = gpt(layers)
    return replace(made, hosted={f"blocks.{number}": ahead for number in range(layers)})


def schedule(layers: int = 4, ahead: int = 1, accumulate: int = 1, train: bool = True) -> Schedule:
    """The schedule of it."""
    return build(program(layers, ahead), gpt(layers)[1], Policy(), accumulate, train)


def around(found: Schedule) -> list[str]:
    """Computes of units and moves of activations, in words."""
    kinds = ("forward", "backward", *MOVES)
    return [str(op) for op in found if op.kind in kinds and op.target.startswith("blocks")]


def test_they_stand_around_computes() -> None:
    found = schedule(3)
    check(found)
    assert around(found) == [
        "forward blocks.0",
        "activation_offload blocks.0",
        "forward blocks.1",
        "wait activation_offload blocks.0",
        "activation_offload blocks.1",
        "forward blocks.2",
        "wait activation_offload blocks.1",
        "activation_fetch blocks.1",
        "backward blocks.2",
        "activation_fetch blocks.0",
        "wait activation_fetch blocks.1",
        "backward blocks.1",
        "wait activation_fetch blocks.0",
        "backward blocks.0",
    ]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2))
def test_any_program_is_built_printed_and_checked(data: st.DataObject, units: int, ahead: int, accumulate: int) -> None:
    names = data.draw(st.lists(st.sampled_from([f"u{i}" for i in range(units)]), min_size=1, max_size=8))
    counts = {name: itertools.count() for name in names}
    calls = tuple(Call(name, next(counts[name])) for name in names)
    backward = data.draw(st.permutations(calls))[: data.draw(st.integers(0, len(calls)))]
    hosted = {name: ahead for name in data.draw(st.sets(st.sampled_from(sorted(counts))))}
    made = Program(calls, tuple(backward), {name: () for name in counts}, hosted=hosted)
    found = build(made, [], Policy(), accumulate)
    check(found)
    assert parse(str(found)) == found and str(parse(str(found))) == str(found)
    moved = [op for op in found if op.kind in MOVES]
    assert len(moved) == 4 * accumulate * len(hosted_calls(made))
    assert [op for op in found if op not in moved] == list(build(replace(made, hosted={}), [], Policy(), accumulate))


def test_as_many_calls_as_it_is_ahead_keep_theirs() -> None:
    for ahead in (1, 2, 3, 9):
        kept = [op.kind for op in schedule(4, ahead)].count("activation_offload")
        assert kept == max(4 - ahead, 0)


def test_an_evaluation_moves_nothing() -> None:
    assert not [op for op in schedule(train=False) if op.kind in MOVES]


def test_a_schedule_that_breaks_the_rules_is_refused() -> None:
    """Each move is left out, made twice, and moved by some ops to either side."""
    found = schedule(4, 1, 2)
    ops = list(found.ops)
    for at, op in enumerate(ops):
        if op.kind not in MOVES:
            continue
        for broken in ([*ops[:at], *ops[at + 1 :]], [*ops[: at + 1], *ops[at:]]):
            with pytest.raises(ScheduleError):
                check(replace(found, ops=tuple(broken)))
    for at, op in enumerate(ops):
        if op.kind in MOVES:
            rest = [*ops[:at], *ops[at + 1 :]]
            far = {  # past the compute that it belongs to
                "activation_offload": rest.index(Op("forward", op.target, 0, op.microbatch)),
                "wait activation_offload": len(rest) - 1,
                "activation_fetch": rest.index(Op("forward", op.target, 0, op.microbatch)) + 1,
                "wait activation_fetch": rest.index(Op("backward", op.target, 0, op.microbatch)) + 1,
            }[op.kind]
            with pytest.raises(ScheduleError):
                check(replace(found, ops=(*rest[:far], op, *rest[far:])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("wait activation_fetch blocks.1", None), "blocks.1 reads what it has kept, which is on its way back"),
        (("activation_fetch blocks.1", "forward blocks.3"), "what blocks.1 keeps comes back before the backward"),
        (("activation_offload blocks.0", "forward blocks.0"), "what blocks.0 keeps leaves before its forward"),
        (("wait activation_offload blocks.0", "forward blocks.3"), "activation_offload of blocks.0"),
        (("activation_fetch blocks.0", "backward blocks.2"), "is differentiated 2 computes ahead; its limit is 1"),
    ],
)
def test_the_error_says_what_is_wrong(change: tuple[str, str | None], words: str) -> None:
    found = schedule(4, 1)
    moved, before = change
    ops = list(found.ops)
    (op,) = [op for op in ops if str(op) == moved]
    ops.remove(op)
    if before is not None:
        place = next(number for number, other in enumerate(ops) if str(other) == before)
        ops.insert(place, op)
    with pytest.raises(ScheduleError, match=words):
        check(replace(found, ops=tuple(ops)))


def test_bad_programs_are_refused() -> None:
    made, _ = gpt(2)
    with pytest.raises(PlanError, match="'nobody' keeps its activations on the host, and is not called"):
        replace(made, hosted={"nobody": 1})
    with pytest.raises(PlanError, match="come back 0 computes ahead; at least 1"):
        replace(made, hosted={"blocks.0": 0})
    text = str(schedule(2))
    for line, words in (
        ("hosted blocks.0", "is written 'NAME ahead=COMPUTES'"),
        ("hosted blocks.0 behind=1", "expected ahead="),
        ("hosted blocks.1 ahead=1\nhosted blocks.1 ahead=1", "hosted twice"),
    ):
        with pytest.raises(ScheduleError, match=words):
            parse(text.replace("hosted blocks.0 ahead=1", line, 1))


def test_the_account_has_the_host() -> None:
    found = schedule(4, 1, 2)
    computes = found.stages.computes
    sizes = {f"blocks.{number}": 100 * (number + 1) for number in range(4)}
    moved = {op.target for op in found if op.kind == "activation_offload"}
    needs = [Need(0, 0, 0, hosted=sizes[op.target] if op.target in moved else 0) for op in computes]
    assert footprint(found, needs).host_bytes == sum(sizes[unit] for unit in moved)


def test_copies_run_beside_compute() -> None:
    """A copy takes no time where compute hides it; where it takes longer, what waits for it is exposed."""
    found = schedule(4, 1)
    seconds = {(op.kind, op.target): 1.0 for op in found if op.kind in ("forward", "backward") and op.target != "root"}
    plain = simulate(found, Costs(seconds)).seconds
    moved = [op.target for op in found if op.kind == "activation_offload"]

    def copies(each: float) -> Costs:
        return Costs(seconds, copies={(kind, unit): each for kind in MOVES[::2] for unit in moved})

    assert simulate(found, copies(0.5)).seconds == simulate(found, copies(1.0)).seconds == plain
    slow = simulate(found, copies(3.0))
    assert slow.seconds > plain + 3.0
    assert {op.kind for _, op in slow.waits()} <= {"wait activation_offload", "wait activation_fetch"}
