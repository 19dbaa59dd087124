"""What is known of a pipeline before it runs: schedules of all positions, needs of a rank, the plan, and pictures."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import BatchError, PlanError
from fshard.pipeline import joint_schedules, make_order
from fshard.pipeline.pipeline_trace import PipelineTrace
from fshard.schedule.footprint import Need, footprint
from fshard.sharding.plan_table import held as bytes_held
from fshard.view.pipeline_timeline import action_bars, messages
from tests.pipeline.abstract_programs import batch, plan_on, step_on, traced
from tests.pipeline.held_microbatches import held

FORWARD = fs.sim.Costs({("forward", ""): 1.0, ("backward", ""): 2.0})


def test_print_has_a_lane_a_position_in_columns() -> None:
    lines = str(traced("1f1b", 2, 3).schedules).split("\n")
    assert lines[0] == (
        "1f1b: 2 stages at 2 positions, 3 microbatches, idle 25.0% if backwards take twice as long as forwards"
    )
    assert lines[1:3] == ["position 0  0F0 0F1     0B0 0F2 0B1     0B2", "position 1      1F0 1B0 1F1 1B1 1F2 1B2"]
    assert lines[3].startswith("position 0: stage 0, ") and lines[3].endswith("sends 384 B to other stages")


def test_all_ranks_find_the_same_schedules_and_each_its_own() -> None:
    found = [traced("interleaved", 2, 4, 2, data=2, rank=rank) for rank in range(4)]
    assert all(isinstance(one, PipelineTrace) and one.schedules == found[0].schedules for one in found)
    assert len({one.schedules.hash for one in found}) == 1
    assert found[0].schedules.hash != traced("interleaved", 2, 6, 2, data=2).schedules.hash
    for rank, one in enumerate(found):
        assert one.schedule == one.schedules.ranks[rank // 2]
        assert len(one.needs) == len(one.schedule.stages.computes)
    assert found[0].communicators[-1] == ("edge 3>2", ("stage",))
    assert found[0].schedules.order == make_order("interleaved", 2, 4, 2)
    assert "position 1" in found[0].schedules._repr_html_() and "position 1" in found[0]._repr_html_()


@pytest.mark.parametrize(("order", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_activations_of_microbatches_under_way_add_up(order: str, chunks: int) -> None:
    """At the end of the forward that leaves most behind, all stages hold what the order says."""
    for rank in range(2):
        found = traced(order, 2, 6, chunks, rank=rank)
        forwards = {need.part: need.after for need in found.needs if need.part >= 0 and not need.shared}
        least = sum(
            count * forwards[stage]
            for stage, count in enumerate(held(make_order(order, 2, 6, chunks)))
            if stage in forwards and chunks == 1 and order in ("gpipe", "1f1b")
        )
        assert found.footprint.activation_bytes >= least
        alone = footprint(found.schedule, [replace(need, part=0) for need in found.needs])
        assert found.footprint.activation_bytes >= alone.activation_bytes * (chunks == 1)
    if order == "gpipe":
        half = traced(order, 2, 3, rank=1).footprint.activation_bytes
        assert found.footprint.activation_bytes - half == 3 * forwards[1]


def test_gradients_that_leaves_share_count_once() -> None:
    """Two stages of a rank, each with a gradient outside of units: gradients of both wait once."""
    found = traced("interleaved", 2, 4, 2)
    bare = [replace(need, after=need.after - need.shared, shared=0) for need in found.needs]
    assert any(need.shared for need in found.needs)
    assert footprint(found.schedule, bare).activation_bytes <= found.footprint.activation_bytes
    twice = [replace(need, shared=0) for need in found.needs]
    assert footprint(found.schedule, twice).activation_bytes >= found.footprint.activation_bytes


def test_needs_of_ordinary_steps_do_not_add_up() -> None:
    params = {"w": torch.ones(4)}
    plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    step = fs.make_train_step(lambda p, x: (p["w"] * x).sum(), fs.optim.sgd(0.1), plan, accumulate=4)
    schedule = step.trace(torch.ones(4, 4)).schedule
    assert footprint(schedule, [Need(100, 50, 0)]).activation_bytes == 50


def test_what_a_trace_says_of_this_rank() -> None:
    first, last = (traced("1f1b", 2, 2, rank=rank, tied=True) for rank in range(2))
    assert first.unused == last.unused == () and first.choice is None
    assert first.flops < last.flops  # the head
    assert ("stage_sum 0+1", ("stage",)) in first.communicators
    with pytest.raises(BatchError):
        step_on(fs.abstract_mesh((2, 1), ("stage", "data")), "1f1b", 1, 4).trace(batch(1))


def run_steps() -> tuple[Any, ...]:
    """On a rank of a virtual mesh: what was known before a step is what ran."""
    mesh = MESH[0]
    step = step_on(mesh, "1f1b", 1, 2)
    with pytest.raises(PlanError, match="no schedules yet"):
        print(step.schedules)
    model, _ = plan_on(mesh)
    state = fs.init_state(step.plan.whole, fs.optim.sgd(0.1), params=model.params)
    found = step.trace(batch(2))
    state, metrics = step_on(mesh, "1f1b", 1, 2)(state, batch(2))  # a step that was not traced
    assert metrics.ran.flops == 2 * found.flops
    step(state, batch(2))
    assert step.schedules == found.schedules and step.schedule == found.schedule and step.record == step.schedule.ops
    return step.measured.seconds > 0, found.schedules.hash


MESH = [fs.virtual_mesh((2, 1), ("stage", "data"))]


def test_what_ran_is_what_was_traced() -> None:
    first, second = MESH[0].run(run_steps)
    assert first == second and first[0]


def test_print_of_a_plan_has_the_stages_and_bytes_of_them_alone() -> None:
    _, plan = plan_on(fs.abstract_mesh((2, 2), ("stage", "data")), tied=True)
    rows = {line.split()[0]: line.split() for line in str(plan).split("\n") if "f32[" in line}
    assert "stage" in str(plan).split("\n")[1].split()
    assert rows["blocks.0.0.weight"][-5:] == ["0", "256", "0", "0", "0"] or rows["blocks.0.0.weight"][-2:] == ["0", "0"]
    assert rows["embed.weight"][-6:-4] == ["0,", "1"]
    sizes, places = bytes_held(plan.mesh, plan.places(), plan.stages), plan.places()
    for rank in range(4):
        own = plan.at_position(rank // 2, plan.own.mesh)
        alone = bytes_held(own.mesh, own.places())
        assert {path: sizes[path][rank] for path in places} == {
            path: alone[path][rank % 2] if path in alone else 0 for path in places
        }
    wide = plan_on(fs.abstract_mesh((2, 4), ("stage", "data")))[1]
    (row,) = [line for line in str(wide).split("\n") if line.startswith("blocks.1.0.weight")]
    assert row.split()[-3] == "1"
    assert "stage" not in str(plan.own).split("\n")[1].split()
    assert fs.view.plan(plan).totals == [sum(sizes[path][rank] for path in places) for rank in range(4)]
    assert "rank 0: 0" in str(fs.view.sharding(plan, "blocks.1.0.weight"))


@pytest.mark.parametrize(("order", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_picture_has_the_actions_of_all_positions(order: str, chunks: int) -> None:
    schedules = traced(order, 2, 4, chunks).schedules
    costs = FORWARD if order != "zbv" else fs.sim.Costs({**FORWARD.seconds, ("weight", ""): 1.0})
    simulation = fs.sim.simulate(schedules, costs)
    for simulated in (None, simulation):
        bars = list(action_bars(schedules, simulated))
        for position, lane in enumerate(schedules.order.ranks):
            mine = [bar for bar in bars if bar.position == position]
            assert [bar.action for bar in mine] == list(lane)
            assert all(one.end <= other.begin + 1e-9 for one, other in zip(mine, mine[1:], strict=False))
    sends = sum(op.kind == "send" for schedule in schedules.ranks for op in schedule)
    found = list(messages(simulation))
    assert len(found) == sends and all(sender != receiver for _, _, sender, receiver in found)


def test_figures() -> None:
    pytest.importorskip("matplotlib")
    schedules = traced("1f1b", 2, 2).schedules
    figure = fs.view.timeline(schedules)
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["position 0\nstage 0", "position 1\nstage 1"]
    timed = fs.view.timeline(schedules, fs.sim.simulate(schedules, FORWARD))
    assert "idle" in timed.axes[0].get_xlabel()
    with pytest.raises(PlanError, match="simulation"):
        fs.view.timeline(schedules, fs.sim.simulate(schedules.ranks[0], FORWARD))


@fs.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A unit that is a function."""
    return torch.tanh(x @ p["w"])


@fs.unit
def both(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A unit that reads leaves of two units of the plan."""
    return x @ p["0"]["w"] @ p["1"]["w"]


def function_step(fn: Any) -> Any:
    """A step of two layers, each with a stage of its own."""
    params = {"layers": {name: {"w": torch.eye(4)} for name in "01"}}
    mesh, batch_spec, stages = fs.abstract_mesh((2, 1), ("stage", "data")), fs.P("data"), fs.Stages("stage")
    plan = fs.make_plan(params, mesh, [(".*", fs.P())], units=["layers.*"], batch=batch_spec, stages=stages)
    return fs.make_train_step(lambda p, x: fn(p["layers"], x).mean(), fs.optim.sgd(0.1), plan, accumulate=2)


def test_units_that_are_functions_are_on_the_stage_of_their_leaves() -> None:
    found = function_step(lambda p, x: layer(p["1"], layer(p["0"], x))).trace(torch.ones(4, 4))
    units = [{op.target for op in each if op.kind == "forward"} - {"root"} for each in found.schedules.ranks]
    assert units == [{"layer(layers.0.w)"}, {"layer(layers.1.w)"}]


def test_an_edge_may_have_several_messages_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that wait to be sent then take memory for each."""
    made, costs = joint_schedules.rank_program, fs.sim.Costs(FORWARD.seconds, fs.sim.Link(10.0, 0.1))
    one = traced("1f1b", 2, 6, rank=1)
    monkeypatch.setattr(joint_schedules, "rank_program", lambda *args: made(*args[:-1], 2))
    two = traced("1f1b", 2, 6, rank=1)
    assert one.schedules.hash != two.schedules.hash
    name = next(item for item in two.schedule.memory.sizes if item.startswith("send:"))
    spans = two.schedule.memory.lifetimes[name]
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
    assert fs.sim.simulate(two.schedules, costs).seconds <= fs.sim.simulate(one.schedules, costs).seconds


def test_units_of_several_stages_are_refused() -> None:
    step = function_step(lambda p, x: layer(p["1"], both(p, x)))
    with pytest.raises(PlanError, match=r"no stage holds all leaves that unit both\(layers\) reads"):
        step.trace(torch.ones(4, 4))
