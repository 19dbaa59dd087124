"""What would have to change for a step to fit: each remedy is what the changed step itself would hold and take."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.foresight.foresee import Foresight, foresee
from fshard.foresight.jobs import Job, job_of
from fshard.foresight.remedies import Remedy, remedies

HOST = "unpinned_host"
HARDWARE = fs.sim.hardware("h100", memory=1000, communicator=1)
MESH = fs.abstract_mesh((4,), ("data",))


def job(rules: list[Any] | None = None, opt: Any = None, **more: Any) -> Job:
    """Four layers, as ``fshard plan`` takes them."""
    params = {f"l{i}": {"w": torch.empty(64, 64, device="meta")} for i in range(4)}

    @fs.unit
    def layer(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ weights["w"]))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for weights in params.values():
            x = layer(weights, x)
        return x.square().mean()

    made = {"model": params, "loss": loss, "batch": torch.empty(8, 64, device="meta"), "optimizer": opt, **more}
    return job_of("a job", {**made, "rules": rules or [(".*", fs.fsdp("data"))]})


def found(made: Job, hardware: Any = HARDWARE) -> tuple[Foresight, dict[str, Remedy]]:
    """What does not fit, and its remedies by their first words."""
    step, batch = made.step(MESH)
    seen = foresee(step, batch, hardware)
    every = remedies(seen, step, functools.partial(made.step, MESH))
    return seen, {remedy.change.partition(" (")[0].partition(":")[0]: remedy for remedy in every}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("optimizer state in host memory", {"opt_memory_kind": HOST}),
        ("parameters, too", {"memory_kind": HOST, "update_on": "device"}),
    ],
)
def test_host_memory_is_what_rules_that_say_so_would_do(words: str, rule: dict[str, Any]) -> None:
    seen, changes = found(job())
    step, batch = job([fs.Rule(".*", fs.fsdp("data"), **rule)]).step(MESH)
    there = foresee(step, batch, HARDWARE)
    same = next(each for each in there.candidates if each.policy == seen.least.policy)
    remedy = changes[words]
    assert (remedy.peak_bytes, remedy.seconds) == (there.held(same), pytest.approx(same.seconds))
    assert remedy.peak_bytes < seen.held(seen.least) and remedy.seconds > seen.least.seconds


def test_rows_are_halved_where_steps_can_cut_them() -> None:
    words, batch = "half the rows in a microbatch, with accumulate= doubled", torch.empty(8, 4, 64, device="meta")
    for spec, cut in ((fs.P("data"), True), (fs.P(None, "data"), False)):
        assert (words in found(job(batch=batch, batch_spec=spec))[1]) is cut


def test_recomputation_is_timed_as_the_step_that_does_it() -> None:
    seen, changes = found(job())
    step, batch = job().step(MESH, remat="all")
    again = foresee(step, batch, HARDWARE)
    same = next(each for each in again.candidates if each.policy == seen.least.policy)
    assert (changes['remat="all"'].peak_bytes, changes['remat="all"'].seconds) == (again.held(same), same.seconds)


@pytest.mark.parametrize("rows", [8, 4096])  # few activations, and many
def test_all_that_help_hold_least_together(rows: int) -> None:
    seen, changes = found(job(batch=torch.empty(rows, 64, device="meta")))
    both = changes.pop("all of these that help, together")
    least = min(each.peak_bytes for each in changes.values())
    assert both.peak_bytes < least < seen.held(seen.least) and both.seconds > changes["parameters, too"].seconds


def test_what_is_in_host_memory_already_is_no_remedy() -> None:
    rules = [fs.Rule(".*", fs.fsdp("data"), memory_kind=HOST)]
    changes = found(job(rules))[1]
    assert "optimizer state in host memory" in found(job())[1]
    assert not {"optimizer state in host memory", "parameters, too", "and updated there"} & {*changes}


def test_frozen_leaves_and_sharded_state_stay_where_they_are() -> None:
    frozen = [fs.Rule("l0.*", fs.fsdp("data"), trainable=False), (".*", fs.fsdp("data"))]
    assert "optimizer state in host memory" in found(job(frozen))[1]
    zero = [fs.Rule(".*", fs.P(), opt=fs.fsdp("data"))]
    changes = found(job(zero))[1]
    assert "optimizer state in host memory" in changes and "parameters, too" not in changes


def test_what_no_change_mends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import torch\ndef make():\n    return {'model': {'w': torch.empty(64, 64, device='meta')}, 'batch': "
        "torch.empty(8, 64, device='meta'), 'loss': lambda params, x: (x @ params['w']).square().mean()}\n"
    )
    for memory, said in (("1K", True), ("100M", False)):
        flags = ["--mesh", "2", "--communicator", "1", "--html", str(tmp_path / "page.html")]
        main(["plan", f"{path}:make", "--memory", memory, *flags])
        printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
        assert ("None of these is enough" in printed) is ("None of these is enough" in page) is said
    assert main(["plan", f"{path}:make", "--memory", "60K", *flags]) == 1
    printed = capsys.readouterr().out
    assert "which fits; a step of" in printed and "None of these" not in printed
