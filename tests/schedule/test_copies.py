"""Copies between a device and the memory of its host: exact where a hand can follow."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.schedule import Costs, Link, Policy, Transfer, build, simulate
from fshard.schedule.costs import Noise, read_costs
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import HOST
from tests.schedule.test_simulate import chain, costs, spans

SHARD = Link(100.0)
"""A second for each transfer of a chain."""


def hosted(count: int, policy: Policy, sent: int = 100) -> Schedule:
    """A chain of units whose shards come from the host and whose gradients go there."""
    program, groups = chain(count, sent)
    away = Transfer("offload", "shard", HOST, 100)
    return build(program, [replace(each, transfers=[*each.transfers, away]) for each in groups], policy)


def copied(schedule: Schedule, comes: float, goes: float, link: Link = SHARD) -> Costs:
    """Forwards of 2 seconds, backwards of 4, and copies of so many."""
    seconds = {"all_gather": comes, "offload": goes}
    copies = {(op.kind, op.target): seconds[op.kind] for op in schedule if op.kind in seconds}
    return replace(costs(schedule, link), copies=copies)


def test_a_shard_comes_before_it_is_sent_and_one_after_the_other() -> None:
    schedule = hosted(3, Policy(prefetch=2))
    run = simulate(schedule, copied(schedule, 1.5, 0.0))
    assert spans(run, "all_gather", "forward")[:7] == [
        ("all_gather u0", 1.5, 2.5),
        ("all_gather u1", 3, 4),
        ("forward root", 0, 0),
        ("all_gather u2", 4.5, 5.5),
        ("forward u0", 2.5, 4.5),
        ("forward u1", 4.5, 6.5),
        ("forward u2", 6.5, 8.5),
    ]


def test_gradients_go_one_after_the_other_beside_compute_and_waits_for_them_are_exposed() -> None:
    schedule = hosted(2, Policy(prefetch=1))
    free, run = (simulate(schedule, copied(schedule, 0.0, goes)) for goes in (0.0, 3.0))
    assert spans(run, "backward", "reduce_scatter", "offload", "wait offload") == [
        ("backward u1", 5, 9),
        ("reduce_scatter u1", 9, 10),
        ("backward u0", 9, 13),
        ("reduce_scatter u0", 13, 14),
        ("backward root", 13, 13),
        ("offload u1", 13, 16),
        ("offload u0", 14, 19),  # issued when its gradient is whole, behind the other
        ("wait offload u1", 14, 16),
        ("wait offload u0", 16, 19),
    ]
    assert run.exposed_by_kind["offload"] == run.seconds - free.seconds == 5
    assert free.exposed_by_kind.get("offload") is None
    assert sum(run.exposed_by_kind.values()) == pytest.approx(run.exposed)
    assert run.sent == free.sent and run.sent_by_axes == free.sent_by_axes  # between ranks


def test_a_group_of_one_rank_comes_without_a_link() -> None:
    schedule = hosted(2, Policy(prefetch=0), sent=0)
    run = simulate(schedule, copied(schedule, 1.0, 0.0))
    assert spans(run, "all_gather")[:2] == [("all_gather u0", 0, 1), ("all_gather u1", 3, 4)]
    assert (run.exposed_by_kind, run.sent) == ({"all_gather": 3}, 0)  # the last unit is kept for its backward


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.floats(0, 5), st.floats(0, 5))
def test_equal_ranks_copy_as_one_does_and_nothing_gets_slower_without(
    count: int, prefetch: int, comes: float, goes: float
) -> None:
    schedule = hosted(count, Policy(prefetch=prefetch))
    given = copied(schedule, comes, goes)
    one, all_ = simulate(schedule, given), simulate(schedule, given, fs.abstract_mesh((3,), ("shard",)), Noise())
    assert all_.seconds == pytest.approx(one.seconds)
    assert simulate(schedule, replace(given, copies={})).seconds <= one.seconds + 1e-9


def test_copies_are_saved_and_composed(tmp_path: Path) -> None:
    schedule = hosted(1, Policy())
    mine = copied(schedule, 1.0, 2.0)
    mine.save(tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == mine
    assert mine.only({"offload"}).copies == {("offload", "u0"): 2.0}
    other = Costs(copies={("offload", "u0"): 3.0})
    assert mine.over(other).copies == {("all_gather", "u0"): 1.0, ("offload", "u0"): 3.0}
    assert mine.over(Link()).copies == mine.copies


def test_copies_of_nothing_are_refused() -> None:
    schedule = hosted(1, Policy())
    with pytest.raises(PlanError, match="offload u9: no such op"):
        simulate(schedule, Costs(copies={("offload", "u9"): 1.0}))
    for kind in ("update", "wait all_gather", "reduce_scatter"):
        with pytest.raises(PlanError, match=f"{kind} u0 starts no copy: those that do are all_gather, offload"):
            Costs(copies={(kind, "u0"): 1.0})
    with pytest.raises(PlanError, match="offload u0 takes -1 seconds"):
        Costs(copies={("offload", "u0"): -1})
    with pytest.raises(PlanError, match="copies is 3"):
        Costs(copies=3)  # type: ignore[arg-type]
