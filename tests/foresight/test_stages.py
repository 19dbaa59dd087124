"""``fshard plan`` with stages: the numbers are those of traces and simulations, and what cannot be says why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.foresight.hardware import Hardware
from fshard.foresight.jobs import Job
from fshard.foresight.staged_foresight import StagedForesight, foresee_stages

WIDTH, ROWS = 16, 8


def job(**options: Any) -> Job:
    """A net of eight blocks."""
    with fs.empty_weights():
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
        model = fs.split(nn.Sequential(*layers), units=("*",))

    def loss(params: Any, batch: torch.Tensor) -> Any:
        return model.apply(params, batch).square().mean()

    given = {"stages": fs.Stages("stage"), "accumulate": 4, **options}
    return Job(model, loss, torch.zeros(ROWS, WIDTH, device="meta"), **given)


def seen(sizes: tuple[int, ...] = (2, 2), hardware: Hardware | None = None, **options: Any) -> StagedForesight:
    """The forecast of that net on a mesh."""
    mesh = fs.abstract_mesh(sizes, ("stage", "data"))
    return foresee_stages(job(**options), mesh, hardware or fs.sim.hardware("h100", communicator=0))


@pytest.mark.parametrize(("order", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)])
def test_an_option_is_what_steps_of_all_positions_trace(order: str, chunks: int) -> None:
    stages, options = fs.Stages("stage", chunks=chunks), seen().options
    option = next(one for one in options if one.policy == fs.Policy(pipeline=order) and one.stages == stages)
    for position, run in enumerate(option.simulation.ranks):
        mesh = fs.abstract_mesh((2, 2), ("stage", "data"), rank=2 * position)
        step, batch = job(stages=stages).step(mesh, schedule=option.policy)
        found = step.trace(batch)
        assert found.schedule.hash == run.schedule.hash == option.schedules.ranks[position].hash
        beside = option.held[position] - option.states[position]
        assert found.footprint.peak_bytes == beside


def test_the_fastest_that_fits_is_chosen() -> None:
    free = seen()
    assert {each.policy.pipeline for each in free.options} == {
        *("gpipe", "1f1b", "zb_h1", "interleaved", "zbv", "dualpipev")
    }
    assert free.chosen is free.options[0] and free.chosen.seconds == min(each.seconds for each in free.options)
    assert free.parameters == 8 * (WIDTH * WIDTH + WIDTH) and free.rows == ROWS and free.replicas == 2
    assert free.flops == 4 * 8 * 3 * 2 * (ROWS // 4) * WIDTH * WIDTH - 4 * 2 * (ROWS // 4) * WIDTH * WIDTH
    least = min(max(each.held) for each in free.options)
    tight = seen(hardware=fs.sim.hardware("h100", communicator=0, memory=least))
    assert tight.fits and max(tight.chosen.held) == least < max(free.chosen.held)
    none = seen(hardware=fs.sim.hardware("h100", communicator=0, memory=least - 1))
    assert not none.fits and max(none.chosen.held) == least


def test_a_given_cut_keeps_its_orders() -> None:
    found = seen(stages=fs.Stages("stage", cut=(3, 5)))
    assert {each.policy.pipeline for each in found.options} == {"gpipe", "1f1b", "zb_h1"}
    assert found.options[0].stages.cut == (3, 5)


def test_orders_that_cannot_be_are_told_with_their_reason() -> None:
    found = seen((5, 1))
    assert {each.policy.pipeline for each in found.options} == {"gpipe", "1f1b", "zb_h1"}
    assert set(found.refused) == {"interleaved", "zbv", "dualpipev"} and "10 stages" in found.refused["zbv"]


MISTAKES = (
    ({"accumulate": 3}, (2, 2), "8 rows|rows"),
    ({"stages": fs.Stages("pipe")}, (2, 2), "pipe"),
    ({}, (9, 1), "does not cut the units into stages"),
)


@pytest.mark.parametrize(("options", "sizes", "words"), MISTAKES)
def test_what_cannot_be_at_all_is_an_error(options: Any, sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises((PlanError, fs.errors.BatchError, fs.errors.AxisError), match=words):
        seen(sizes, **options)


FILE = """
import torch, fshard as fs
from torch import nn

def make(mesh):
    model = fs.split(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), units=("*",))
    loss = lambda params, x: model.apply(params, x).square().mean()
    return {"model": model, "loss": loss, "batch": torch.zeros(8, 8), "accumulate": 4}

def with_step(mesh):
    made = make(mesh)
    plan = fs.make_plan(made["model"], mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), stages=fs.Stages("stage"))
    return fs.make_train_step(made["loss"], fs.optim.sgd(0.1), plan, accumulate=4), made["batch"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of jobs."""
    (tmp_path / "train.py").write_text(FILE)
    return tmp_path / "train.py"


def test_the_command_prints_positions_and_orders(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", f"{file}:make", "--mesh", "stage=2,data=2", "--communicator", "1"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "The positions on the axis of stages" in text and text.count("<- chosen") == 1 and "1f1b" in text
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stages"] == "stage" and told["fits"] and len(told["peak_bytes"]) == 2
    assert told["seconds"] == min(each["seconds"] for each in told["options"])
    assert main([*given, "--memory", "1K"]) == 1
    assert "no order fits into 1000 B" in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["80G", "1K"])
def test_the_command_writes_a_page(memory: str, file: Path) -> None:
    pytest.importorskip("matplotlib")
    page = file.with_name("page.html")
    main(["plan", f"{file}:make", "--mesh", "stage=2,data=2", "--html", str(page), "--memory", memory])
    text = page.read_text()
    assert "The positions on the axis of stages" in text and "data:image/png;base64," in text
    assert text.endswith("</body></html>") and ("no order fits into 1000 B" in text) == (memory == "1K")


def test_a_step_has_the_order_of_its_policy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:with_step", "--mesh", "stage=2,data=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["order"] for each in found["options"]] == ["1f1b"] and found["microbatches"] == 4
    assert main(["plan", f"{file}:make", "--mesh", "stage=2,data=2", "--json"]) == 0
    every = {each["policy"]: each for each in json.loads(capsys.readouterr().out)["options"]}
    same = next(each for policy, each in every.items() if 'reshard=true update=deferred pipeline="1f1b"' in policy)
    assert same["seconds"] == pytest.approx(found["options"][0]["seconds"], rel=1e-3)  # its optimizer is another


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("make", ("--search",), "--search: not for meshes with stages"),
        ("make", ("--mesh", "stage=4"), "add one, as data=1"),
    ],
)
def test_the_command_refuses_by_name(
    file: Path, name: str, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["plan", f"{file}:{name}", "--mesh", "stage=2,data=2", *more]) == 2
    assert words in capsys.readouterr().err


def test_measured_costs_are_refused() -> None:
    costly = replace(fs.sim.hardware("h100"), costs=fs.sim.Costs())
    with pytest.raises(PlanError, match="--costs are of a step without stages"):
        seen(hardware=costly)
