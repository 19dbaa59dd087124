"""Exchanges between replicas in the words of schedules: bytes, memory, text and hash."""

import dataclasses
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.foresight.foresee import foresee, state_bytes
from fshard.foresight.hardware import hardware
from fshard.schedule import Costs, parse, simulate
from tests.outer_steps.cases import CASES, Case, start, step_of, steps_of

MESH = fs.abstract_mesh((2, 2), ("replica", "data"))
ROWS = tuple(torch.zeros(4, n) for n in (16, 8))
CASE = Case(every=8, wire="int8", fragments=4, delay=5)
"""At most three of its fragments are under way at once."""


def traced(case: Case) -> Any:
    return step_of(case, MESH).trace(ROWS)


def test_the_text_names_what_travels_and_when() -> None:
    schedule = traced(CASE).schedule
    text = str(schedule)
    assert "every=8 first=2 delay=5 as int8/256 over replica" in text
    assert parse(text) == schedule and parse(text).hash == schedule.hash
    assert 'group "fragment 2 of 4" full=0 shard=0 grad=0 frozen' in text
    assert not any("exchange" in op.kind for op in schedule)


CHANGED: dict[str, dict[str, Any]] = {
    "every": {"every": 9},
    "delay": {"delay": 4},
    "format": {"wire": "int4"},
    "number": {"fragments": 3},
    "names": {"fragments": (r"two\..*", ".*")},
}


@pytest.mark.parametrize("name", CHANGED)
def test_each_option_changes_the_hash(name: str) -> None:
    assert traced(CASE).schedule.hash != traced(dataclasses.replace(CASE, **CHANGED[name])).schedule.hash


@pytest.mark.parametrize("name", ["DiLoCo", "fragments", "all under way", "int4", "three replicas"])
def test_bytes_are_those_that_travel(name: str) -> None:
    """Of the rank that sends most; a simulated step sends the mean over steps."""
    case = CASES[name]
    meshes = [fs.abstract_mesh(case.sizes, ("replica", "data"), rank=rank) for rank in range(case.sizes[1])]
    steps = [step_of(case, mesh) for mesh in meshes]
    schedule = steps[0].trace(ROWS).schedule
    moves = [move for group in schedule.groups for move in group.at("between")]
    sent = [max(step.sent(number) for step in steps) for number in range(1, 1 + case.every)]
    assert sum(move.sent for move in moves) == sum(sent) > 0
    run = simulate(schedule, Costs())
    assert run.sent_by_axes["replica"] == sum(move.sent // case.every for move in moves)
    assert run.sent == sum(run.sent_by_axes.values())


@pytest.mark.parametrize("name", ["DiLoCo", "all under way", "int8, fragments under way"])
def test_memory_is_what_is_held(name: str) -> None:
    """Fragments under way, of the step that holds most; the anchor, the outer optimizer's state and the error."""
    case = CASES[name]
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))

    def main() -> Any:
        step, held = step_of(case, mesh), []
        state = fs.init_state(step.plan, step.opt, params=start())
        for number in range(2 * case.every):
            state, _ = steps_of(step, state, number, number + 1)
            held.append(sum(flight.rows.nbytes + flight.sent.nbytes for flight in step._flights.values()))
        buffers = [buffer for shard in state.shards() for buffer in (shard.own, *shard.opt.values())]
        return step, max(held), sum(buffer.nbytes for buffer in buffers)

    step, held, state = mesh.run(main)[0]
    memory = step.trace(ROWS).schedule.memory
    under_way = [item for item in memory.sizes if item.startswith("exchange:")]
    always = [item for item in under_way if memory.lifetimes[item][0][0] == 0]
    assert bool(always) == (case.delay > 0) and len(under_way) >= 1
    assert 0 <= sum(memory.sizes[item] for item in always) - held < 256 * max(len(always), 1)
    assert state_bytes(step, step.plan) == state


def test_the_footprint_and_the_foresight_have_it() -> None:
    """An outer step holds more than the inner one, by what is under way in every step."""
    step = step_of(CASE, MESH)
    inner = fs.make_train_step(step.loss_fn, step.opt.opt, step.plan)
    outer, alone = (each.trace(ROWS) for each in (step, inner))
    more = [size for item, size in outer.schedule.memory.sizes.items() if item.startswith("exchange:")]
    assert len(more) == 3
    assert outer.footprint.peak_bytes - alone.footprint.peak_bytes >= sum(more)
    seen = foresee(step, ROWS, hardware("h100"))
    assert seen.simulation.sent_by_axes["replica"] > 0 and seen.state_bytes == state_bytes(step, step.plan)
    assert seen.chosen.memory.peak_bytes > foresee(inner, ROWS, hardware("h100")).chosen.memory.peak_bytes
