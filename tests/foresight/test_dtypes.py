"""Products take as long as their dtype does, and options that a job does not hear of are refused."""

from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import BatchError, PlanError
from fshard.foresight.foresee import foresee
from fshard.foresight.jobs import Job

FILE = """
import torch, fshard as fs
layer = fs.unit(lambda p, x: torch.tanh(x @ p))
def make():
    return {"model": {"a": torch.empty(64, 64, device="meta")}, "batch": torch.empty(6, 64, device="meta"),
            "loss": lambda p, x: layer(p["a"], x).square().mean(), "accumulate": 2}
"""


def job(**options: object) -> Job:
    layer = fs.unit(lambda p, x: torch.tanh(x @ p["w"]))
    params = {name: {"w": torch.empty(4096, 4096, device="meta")} for name in "abc"}

    def loss(params: dict[str, dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for each in params.values():
            x = layer(each, x.to(each["w"].dtype))
        return x.float().square().mean()

    return Job(params, loss, torch.empty(4096, 4096, device="meta"), **options)  # type: ignore[arg-type]


def test_float32_takes_the_time_of_float32() -> None:
    device = fs.sim.DEVICES["h100"]
    mesh = fs.abstract_mesh((1,), ("data",))
    whole = foresee(*job().step(mesh), fs.sim.hardware("h100"))
    short = foresee(*job(precision=fs.Precision(compute=torch.bfloat16)).step(mesh), fs.sim.hardware("h100"))
    least = whole.flops / (0.7 * device.flops32)
    assert least <= whole.simulation.seconds < 1.3 * least and 0.5 < whole.mfu <= 0.7
    assert short.simulation.seconds < whole.simulation.seconds / 4
    assert "bfloat16" in short.hardware.words_for(short.plan) and "float32" in whole.hardware.words_for(whole.plan)
    told = foresee(*job().step(mesh), fs.sim.hardware("h100", short=True))  # as under autocast
    assert told.simulation.seconds < whole.simulation.seconds / 4
    found = fs.sim.search(job(), [mesh], fs.sim.hardware("h100"), remats=[None])
    assert found.best.seconds == pytest.approx(whole.simulation.seconds)


@pytest.mark.parametrize("option", ["--rows=3", "--length=9", "--accumulate=2", "--remat=all"])
def test_options_of_configs_are_refused_with_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "job.py").write_text(FILE)
    where = f"{tmp_path}/job.py:make"
    assert main(["plan", where, "--mesh", "1", "--json"]) == 0
    assert main(["plan", where, "--mesh", "1", option]) == 2
    assert f"{option.partition('=')[0]}: for --hf alone" in capsys.readouterr().err


def test_a_batch_that_a_step_would_refuse_is_refused_by_its_trace() -> None:
    step, batch = job(accumulate=3).step(fs.abstract_mesh((2,), ("data",)))
    with pytest.raises(BatchError, match="accumulate=3 equal microbatches"):
        step.trace(batch)


def test_a_batch_without_values_is_named_where_they_are_looked_at() -> None:
    params = {"w": torch.ones(4)}
    plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])

    def loss(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (params["w"] * (2.0 if batch["n"].sum().item() > 0 else 1.0)).sum()

    step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
    with pytest.raises(PlanError, match=r"batch\['n'\]: on meta.*torch.zeros"):
        step.trace({"n": torch.ones(3, device="meta")})
    with pytest.raises(PlanError, match="run it once"):
        step.trace({"n": torch.ones(3)})


def test_what_is_no_answer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh, machine = fs.abstract_mesh((1,), ("data",)), fs.sim.hardware("h100")
    with pytest.raises(PlanError, match=r"remats=\[\]"):
        fs.sim.search(job(), [mesh], machine, remats=[])
    with pytest.raises(PlanError, match="links is 5, an int"):
        fs.sim.Costs({("forward", ""): 1.0}).over(5)  # type: ignore[arg-type]
    (tmp_path / "job.py").write_text(FILE)
    assert main(["plan", f"{tmp_path}/job.py"]) == 2
    assert f"give {tmp_path}/job.py:make" in capsys.readouterr().err


def test_a_mesh_without_the_axes_of_a_schedule() -> None:
    step, batch = job().step(fs.abstract_mesh((2,), ("data",)))
    schedule = step.trace(batch).schedule
    costs = fs.sim.Costs({("forward", ""): 1.0, ("backward", ""): 1.0})
    with pytest.raises(PlanError, match="transfers over data, and the axes of the mesh are x"):
        fs.sim.simulate(schedule, costs, mesh=fs.abstract_mesh((5,), ("x",)), noise=fs.sim.Noise())
