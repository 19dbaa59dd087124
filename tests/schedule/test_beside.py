"""Updates on a stream beside compute: each begins ahead of its gather, which waits for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fshard.errors import ScheduleError
from fshard.schedule import GroupInfo, Link, Op, Policy, Schedule, build, check, parse, simulate
from fshard.schedule.ops import COMPUTE_KINDS, UPDATED
from tests.schedule.cases import gpt, group, program, recipes, sends
from tests.schedule.statements import valid
from tests.schedule.test_simulate import costs, spans

BESIDE = Policy(1, 1, update="beside")


def waited(schedule: Schedule) -> Schedule:
    """The same where each update runs where it is waited for."""
    ops = [replace(op, kind="update") if op.kind == UPDATED else op for op in schedule if op.kind != "update"]
    return replace(schedule, ops=tuple(ops), policy=replace(schedule.policy, update="deferred"))


@given(recipes())
def test_waits_stand_where_updates_may_and_updates_begin_ahead(recipe: Any) -> None:
    made, groups, policy, accumulate, train = recipe
    schedule = build(made, groups, replace(policy, update="beside"), accumulate, train)
    check(schedule)
    assert parse(str(schedule)) == schedule
    check(waited(schedule))
    assert valid(waited(schedule))
    began = [op.target for op in schedule if op.kind == "update"]
    assert sorted(began) == sorted(op.target for op in schedule if op.kind == UPDATED)
    for info in groups if train else ():
        at = {op.kind: i for i, op in enumerate(schedule) if op.target == info.name and op.kind in ("update", UPDATED)}
        if at and not sends(info, "update_gather"):
            between = sum(op.kind in COMPUTE_KINDS for op in schedule.ops[at["update"] : at[UPDATED]])
            uses = len(schedule) if not info.gathered else policy.prefetch + 1
            assert at["update"] < at[UPDATED] and between <= max(uses, 2 * policy.prefetch)


def test_updates_begin_twice_the_prefetch_ahead_of_their_reader() -> None:
    for gathered in (True, False):
        made, groups = gpt()
        schedule = build(made, [replace(g, transfers=g.transfers if gathered else ()) for g in groups], BESIDE)
        computes = [op for op in schedule if op.kind in COMPUTE_KINDS]
        at = schedule.ops.index(Op("update", "blocks.3"))
        behind = sum(op.kind in COMPUTE_KINDS for op in schedule.ops[:at])
        assert computes.index(Op("forward", "blocks.3")) - behind == 2 * BESIDE.prefetch
        wait = schedule.ops.index(Op(UPDATED, "blocks.3"))
        assert schedule.ops[wait + 1] == Op("all_gather" if gathered else "forward", "blocks.3")


WAIT, UPDATE = Op(UPDATED, "blocks.1"), Op("update", "blocks.1")


@pytest.mark.parametrize(
    ("taken", "put", "before", "words"),
    [
        (WAIT, None, None, "blocks.1 is gathered before its pending update"),
        (WAIT, WAIT, Op("forward", "blocks.1"), "blocks.1 is gathered before its pending update"),
        (UPDATE, None, None, "no update of blocks.1 is under way"),
        (UPDATE, UPDATE, Op("consensus"), "no update of blocks.1 is under way"),
        (None, WAIT, Op("consensus"), "no update of blocks.1 is under way"),
        (None, UPDATE, Op("consensus"), "blocks.1 was updated before"),
    ],
)
def test_a_gather_waits_for_its_update(taken: Op | None, put: Op | None, before: Op | None, words: str) -> None:
    schedule = build(*gpt(), BESIDE)
    ops = [op for op in schedule if op != taken]
    if put is not None and before is not None:
        ops.insert(ops.index(before), put)
    with pytest.raises(ScheduleError, match=words):
        check(replace(schedule, ops=tuple(ops)))


def test_only_updates_beside_compute_are_waited_for() -> None:
    schedule = build(*gpt(), Policy(1, 1))
    at = schedule.ops.index(UPDATE)
    with pytest.raises(ScheduleError, match="no update of blocks.1 is under way"):
        check(replace(schedule, ops=(*schedule.ops[: at + 1], WAIT, *schedule.ops[at + 1 :])))


def test_a_gradient_and_what_an_update_makes_are_held_until_its_wait() -> None:
    made, groups = gpt()
    schedule = build(made, [replace(g, update_bytes=100) for g in groups], BESIDE)
    at = {str(op): i for i, op in enumerate(schedule)}
    assert schedule.memory.lifetimes["shard:blocks.3"][0] == (0, at["wait update blocks.3"])
    assert schedule.memory.lifetimes["update:blocks.3"] == ((at["update blocks.3"], at["wait update blocks.3"]),)
    assert at["forward blocks.1"] in range(at["update blocks.3"], at["wait update blocks.3"])


def test_updates_hide_behind_compute() -> None:
    names = [f"u{i}" for i in range(4)]
    groups: list[GroupInfo] = [group(name, 100, 100, 100, gathered=False, reduced=False) for name in names]
    made = program(names, {name: (i,) for i, name in enumerate(names)})
    took = {}
    for update in ("deferred", "beside"):
        schedule = build(made, groups, Policy(1, 1, update=update))
        run = simulate(schedule, costs(schedule, Link(100.0), update=1.0))
        took[update] = run.seconds
    assert took == {"deferred": 28, "beside": 25}  # the first update alone is exposed
    assert spans(run, "update", UPDATED)[:2] == [("update u0", 0, 1), ("update u1", 1, 2)]
