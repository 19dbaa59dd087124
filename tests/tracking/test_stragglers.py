"""A slow rank is named: the waits of others are no compute of theirs."""

import dataclasses
import functools
import time
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import NonFiniteError
from fshard.runtime.flight.rank_records import OVER, FlightEntry, RankRecord
from fshard.runtime.flight.verdict import straggler
from fshard.runtime.steps.protocol import Pace
from fshard.schedule.ops import Op
from tests.shared.workers import Pools


def slow() -> Any:
    """Three steps, between which rank 1 sleeps; what each rank is told of the last one."""
    mesh = fs.make_mesh((2,), ("data",))
    plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda params, x: (params["w"] - x).square().mean(), opt, plan)
    state = fs.init_state(plan, opt, params={"w": torch.zeros(4)})
    for _ in range(3):
        time.sleep(0.4 * mesh.rank)
        state, metrics = step(state, torch.ones(2, 4))
    found = metrics.scalars()
    grad = fs.value_and_grad(lambda params, x: (params["w"] - x).square().mean(), plan)
    update = fs.make_update(opt, plan)
    own = fs.make_step(lambda state, x: update(state, grad(state, x)[1]), plan)
    for _ in range(2):
        time.sleep(0.4 * mesh.rank)
        state, _ = own(state, torch.ones(2, 4))
    found["own"] = list(own.busy)
    return {"slowest": metrics.ran.slowest, "compute": step.measured.compute, **found}


@pytest.mark.long
@pytest.mark.processes
def test_a_straggler_is_named(pool: Pools) -> None:
    """Rank 1 sleeps between steps: all ranks know, and rank 0 does not take its own wait for compute."""
    for rank, found in enumerate(pool(2).run(slow)):
        assert found["slowest"] == found["busy_max_rank"] == 1
        assert found["busy_max"] > 0.39 > 0.3 > found["busy_min"]
        assert found["compute"] < 0.3
        assert found["own"][1] > 0.39 > 0.3 > found["own"][0]
        if rank == 0:
            assert found["exposed"] > 0.3


@functools.cache
def schedule() -> Any:
    """Of a train step on three ranks."""
    mesh = fs.virtual_mesh((3,), ("data",))
    plan = fs.make_plan({"w": torch.zeros(6)}, mesh, [(".*", fs.fsdp("data"))])
    step = fs.make_train_step(lambda params, x: (params["w"] - x).square().mean(), fs.optim.sgd(0.1), plan)
    return step.trace(torch.ones(3, 6)).schedule


def record(rank: int, runs: int, late: float) -> RankRecord:
    """Of a rank that computes for one second in each run, and so much longer before its first op of it."""
    ops, entries, clock = schedule(), list[FlightEntry](), 100.0 * rank  # clocks of hosts differ
    for run in range(runs):
        waits = {"handshake": 0.5 - late, "consensus": 0.01}
        clock += late
        for number, op in enumerate(ops):
            entries.append(FlightEntry(clock, run, number, 1))
            clock += waits.get(op.kind, 1.0 / len(ops))
        entries.append(FlightEntry(clock, run, OVER, 1))
    return RankRecord(rank, 3, entries, {1: ops})


def test_a_trace_names_the_straggler_with_its_waits() -> None:
    late = straggler([record(0, 4, 0.0), record(1, 4, 0.0), record(2, 4, 0.5)])
    assert late.startswith("the straggler is rank 2: the others waited 2 s of ") and "in 4 runs" in late
    assert "2 s in the handshake" in late and "consensus" not in late
    assert straggler([record(rank, 4, 0.0) for rank in range(3)]).startswith("no straggler")
    assert not straggler([]) and not straggler([record(0, 4, 0.0)])
    torn = dataclasses.replace(record(1, 4, 0.0), entries=record(1, 1, 0.0).entries)
    assert "in 1 runs" in straggler([record(0, 4, 0.0), torn])


def test_waits_are_not_counted() -> None:
    """A rank is busy for the time since its step before, less what it waited in this one."""
    pace, now = Pace(), time.perf_counter()
    pace.since = now - 10.0
    ops = [Op("handshake"), Op("forward", "root")]
    assert 2.9 < pace.busy(ops, [now - 9.0, now - 2.0, now]) < 3.5
    assert pace.busy(ops, []) == 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_that_are_not_finite_have_an_address(ranks: int) -> None:
    """The step, the rank whose loss it is, and the leaves by unit."""
    mesh = fs.virtual_mesh((ranks,), ("data",))
    plan = fs.make_plan({"a": torch.ones(4), "b": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda params, x: (params["a"] * x).mean() + params["b"].sum(), opt, plan)

    def main() -> None:
        state, bad = fs.init_state(plan, opt, params={"a": torch.ones(4), "b": torch.ones(4)}), ranks - 1
        state, _ = step(state, torch.ones(1, 4))
        step(state, torch.full((1, 4), torch.nan if plan.mesh.here.rank == bad else 1.0))

    with pytest.raises(NonFiniteError) as caught:
        mesh.run(main)
    said = str(caught.value)
    assert "step 2" in said and "of a, of unit root" in said and "of b" not in said
    assert (f"rank {ranks - 1}: its own loss is nan" in said) == (ranks > 1)
