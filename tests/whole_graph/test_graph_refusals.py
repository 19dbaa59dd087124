"""What no graph can hold is refused by name, before anything runs."""

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

import fshard as fs
from fshard import P
from fshard.schedule import parse
from tests.device import cases
from tests.shared.capture_device import capturing

GRAPH = fs.Policy(graph="step")

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "update": ({"schedule": fs.Policy(graph="step", update="in_backward")}, "needs update='deferred'"),
    "donate": ({"donate": False}, "needs donate=True"),
    "debug": ({"debug": True}, "no operators for debug=True"),
    "offload": ({"remat": "offload"}, "remat='offload' copies activations to the host"),
    "optimizer": ({"opt": fs.optim.lion(1e-3)}, "lion reads its rate or its count from the host"),
    "own optimizer": ({"opt": type("mine", (fs.optim.adamw,), {})(1e-3)}, "mine reads its rate or its count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_no_graph_holds_are_refused(name: str) -> None:
    options, why = REFUSED[name]
    options = {"schedule": GRAPH} | options
    with capturing() as on:
        mesh, _ = on(fs.make_mesh((1,), ("shard",), device="cpu"))
        with pytest.raises(fs.errors.PlanError, match=why):
            fs.make_train_step(cases.loss, options.pop("opt", fs.optim.adamw(1e-3)), cases.planned(mesh), **options)


def test_segments_end_before_updates_beside_compute_do() -> None:
    plan = cases.planned(fs.abstract_mesh((2,), ("shard",), device="cuda"))
    for graph, raises in (("segments", True), ("step", False)):
        policy = fs.Policy(graph=graph, update="beside")
        with pytest.raises(fs.errors.PlanError, match="does not end with a segment") if raises else nullcontext():
            fs.make_train_step(cases.loss, fs.optim.adamw(1e-3), plan, schedule=policy)


def test_a_mesh_whose_device_captures_nothing_is_named() -> None:
    plan = cases.planned(fs.make_mesh((1,), ("shard",), device="cpu"))
    with pytest.raises(fs.errors.PlanError, match="captures CUDA graphs, and the mesh is on device 'cpu'"):
        fs.make_train_step(cases.loss, fs.optim.adamw(1e-3), plan, schedule=GRAPH)


def test_only_train_steps_capture() -> None:
    plan = cases.planned(fs.make_mesh((1,), ("shard",), device="cpu"))
    for make in (fs.make_eval_step, fs.value_and_grad):
        with pytest.raises(fs.errors.PlanError, match="only fs.make_train_step captures graphs"):
            make(cases.loss, plan, schedule=GRAPH)
    with pytest.raises(fs.errors.PlanError, match="only fs.make_train_step captures graphs"):
        fs.make_step(lambda state, batch: state, plan, schedule=GRAPH)


def test_a_step_is_made_for_gpus_that_are_not_there() -> None:
    mesh = fs.abstract_mesh((2,), ("shard",), device="cuda")
    step = fs.make_train_step(cases.loss, fs.optim.adamw(1e-3), cases.planned(mesh), schedule=GRAPH)
    assert repr(step).startswith("<train step")


def test_stages_are_refused() -> None:
    mesh = fs.abstract_mesh((2, 1), ("stage", "shard"), device="cuda")
    plan = fs.make_plan(
        cases.params(),
        mesh,
        [(".*", fs.fsdp("shard"))],
        batch=P("shard"),
        units=["0", "1", "2"],
        stages=fs.Stages("stage"),
    )
    with pytest.raises(fs.errors.PlanError, match="the host steers what the stages of a pipeline send"):
        fs.make_train_step(cases.loss, fs.optim.adamw(1e-3), plan, schedule=GRAPH)


def test_the_policy_is_printed_parsed_and_hashed_and_gradients_keep_their_memory() -> None:
    def schedule(policy: fs.Policy) -> Any:
        with capturing() as on:
            mesh, _ = on(fs.abstract_mesh((2,), ("shard",), device="cpu"))
            step = fs.make_train_step(cases.loss, fs.optim.adamw(1e-3), cases.planned(mesh), schedule=policy)
            return step.trace(cases.batch(0, mesh)).schedule

    plain, graphed = schedule(fs.Policy()), schedule(GRAPH)
    assert "policy prefetch=2 reduces=2 reshard=true update=deferred graph=step\n" in str(graphed)
    assert parse(str(graphed)) == graphed and graphed.hash != plain.hash
    lives = {item: spans for item, spans in graphed.memory.lifetimes.items() if item.startswith("shard:")}
    assert lives and set(lives.values()) == {((0, len(graphed.ops) - 1),)}
    assert graphed.memory.peak_bytes >= plain.memory.peak_bytes
    with pytest.raises(fs.errors.PlanError, match="graph='whole' is none of 'none', 'step', 'segments'"):
        fs.Policy(graph="whole")


@pytest.mark.long
def test_other_steps_do_not_import_the_room() -> None:
    code = """
import sys, torch, fshard as fs
plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",), device="cpu"), [(".*", fs.fsdp("data"))])
opt = fs.optim.sgd(0.5)
step = fs.make_train_step(lambda p, x: (p["w"] * x).sum(), opt, plan)
step(fs.init_state(plan, opt, params={"w": torch.ones(2)}), torch.ones(2))
sys.exit(any("whole_graph" in name for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
