"""Generated programs, cuts and orders: their schedules are built and run together, and spoiled ones are refused."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import ScheduleError
from fshard.pipeline.joint_schedules import check_joint, joint_schedules
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.rank_program import Lane, RankProgram
from fshard.pipeline.staged_trace import StagedProgram, ValueEdge
from fshard.runtime.execution import ProgramTrace
from fshard.schedule import Call, Policy, Program, Schedule, check
from fshard.schedule.infos import group_infos

ORDERS = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2), ("gpipe", 2)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, str, bool]:
    """Ranks, units of a stage at most, microbatches, chunks, the order, and whether outputs skip over stages."""
    name, chunks = draw(st.sampled_from(ORDERS))
    ranks, units, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return ranks, units, microbatches, chunks, name, draw(st.booleans())


def made(
    case: tuple[int, int, int, int, str, bool], seed: int = 0, policy: Policy | None = None
) -> tuple[list[Schedule], list[RankProgram]]:
    """The schedules of all positions."""
    ranks, most, microbatches, chunks, name, skips = case
    rng, count = random.Random(seed), ranks * chunks
    stages = [stage for stage in range(count) for _ in range(rng.randint(1, most))]
    params = {f"u{n}": {"w": torch.empty(8, 4, device="meta")} for n in range(len(stages))}
    placement = "v" if name in ("zbv", "dualpipev") else "loop"
    cut = [stages.count(stage) for stage in range(count)]
    plan = fs.make_plan(
        params,
        fs.abstract_mesh((ranks, 2), ("stage", "data")),
        [(".*", fs.fsdp("data"))],
        batch=fs.P("data"),
        units=["u*"],
        stages=fs.Stages("stage", cut=cut, chunks=chunks, placement=placement),
    )
    assert plan.stages is not None
    calls = tuple(Call(f"u{n}") for n in range(len(stages)))
    ids = {group.unit: group.id for group in plan.groups}
    program = Program(calls, calls[::-1], {call.unit: (ids[call.unit],) for call in calls})
    last = [max(n for n, s in enumerate(stages) if s == stage) for stage in range(count)]
    edges = {(last[stage], stage + 1) for stage in range(count - 1)}
    if skips:
        edges |= {(n, t) for n, s in enumerate(stages) for t in range(s + 1, count) if rng.random() < 0.3}
    values = [ValueEdge(n, 0, stages[n], t, (2, 4), torch.float32, True, (0, 1)) for n, t in sorted(edges)]
    trace = ProgramTrace(program, True, False)
    staged = StagedProgram(trace, tuple(stages), tuple(values), ((),) * count, ((None, ()),) * len(calls), tuple(last))
    order, policy = make_order(name, ranks, microbatches, chunks), policy or Policy()
    own = [plan.at_position(position, plan.own.mesh) for position in range(ranks)]
    programs, schedules, _ = joint_schedules(staged, [(one, group_infos(one)) for one in own], order, policy, True)
    return schedules, programs


def lanes_of(programs: Sequence[RankProgram]) -> dict[str, Lane]:
    """The lane of each edge."""
    return {name: kind.lane for one in programs for name, kind in one.messages.items()}


def fit_together(case: tuple[int, int, int, int, str, bool], seed: int, policy: Policy) -> None:
    """Build the schedules of all positions, and check them alone and together."""
    schedules, programs = made(case, seed, policy)
    for schedule in schedules:
        check(schedule)
    check_joint(schedules, lanes_of(programs))


DRAWN = cases(), st.integers(0, 1000), st.sampled_from([Policy(), Policy(prefetch=0, reduces=0), Policy(reshard=False)])
test_generated_schedules_fit_together = given(*DRAWN)(fit_together)
test_a_thousand_generated_schedules_fit_together = pytest.mark.slow(
    settings(max_examples=1000, deadline=None)(given(*DRAWN)(fit_together))
)


CASE = (3, 2, 4, 1, "1f1b", True)


def spoiled(schedules: list[Schedule], position: int, ops: Sequence[object]) -> list[Schedule]:
    """The same with other ops at a position."""
    other = dataclasses.replace(schedules[position], ops=tuple(ops))
    return [other if number == position else one for number, one in enumerate(schedules)]


def refused(schedules: list[Schedule], programs: list[RankProgram]) -> str:
    """The error of schedules that do not fit together; empty if they do."""
    try:
        for schedule in schedules:
            check(schedule)
        check_joint(schedules, lanes_of(programs))
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["send", "receive", "wait send", "wait receive"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_missing_message_is_refused(kind: str, position: int) -> None:
    schedules, programs = made(CASE)
    ops = list(schedules[position])
    for number, op in enumerate(ops):
        if op.kind == kind:
            told = refused(spoiled(schedules, position, ops[:number] + ops[number + 1 :]), programs)
            assert op.target in told


def test_messages_in_another_order_are_refused() -> None:
    """A receive that is posted for another microbatch, at both ends in an order that each rank alone could run."""
    schedules, programs = made((2, 1, 3, 1, "gpipe", False))
    turned = {0: 1, 1: 0, 2: 2}
    ops = [
        dataclasses.replace(op, microbatch=turned[op.microbatch]) if op.target == "u0:0>1" else op
        for op in schedules[1]
    ]
    assert "u0:0>1" in refused(spoiled(schedules, 1, ops), programs)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    """A rank that waits for a gradient before it has sent what that is of."""
    schedules, programs = made((2, 1, 2, 1, "gpipe", False))
    ops = list(schedules[0])
    early = [op for op in ops if op.target == "u0:0<1" and op.microbatch == 0]
    rest = [op for op in ops if op not in early]
    with pytest.raises(ScheduleError, match="waits"):
        check_joint(spoiled(schedules, 0, [rest[0], *early, *rest[1:]]), lanes_of(programs))
