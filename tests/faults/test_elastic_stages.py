"""Pipelines that outlive their processes: torchrun starts them again, and other numbers of stages go on."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from tests.faults.staged_job import batch, start, whole
from tests.faults.test_elastic import report, torchrun

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 8


def plain() -> tuple[dict[int, float], dict[str, Any]]:
    """The losses and parameters of a run in one process, without stages and faults."""
    with fs.make_mesh((1,), ("data",)) as mesh:
        step, state = start(mesh)
        losses = {}
        for number in range(STEPS):
            state, metrics = step(state, batch(number))
            losses[state.step] = metrics.loss.item()
        return losses, whole(state)


def check(folder: Path, ranks: int, again: int) -> None:
    """Compare the steps after the checkpoint of step 4 with those of a run in one process."""
    losses, params = plain()
    for rank in range(ranks):
        told = report(folder, rank, again)
        assert told["world"] == ranks and list(told["made"]) == ["5", "6", "7", "8"]
        for number, loss in told["made"].items():
            torch.testing.assert_close(loss, losses[int(number)], rtol=1e-5, atol=1e-6)
        for path, leaf in params.items():
            torch.testing.assert_close(torch.tensor(told["whole"][path]), torch.tensor(leaf), rtol=1e-5, atol=1e-6)


def test_a_killed_stage_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, STEPS, "SIGKILL", 2, 1, "tests.faults.staged_job")
    assert code == 0, output
    check(tmp_path, 2, 1)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_other_numbers_of_stages_go_on(tmp_path: Path, before: int, after: int) -> None:
    for steps, ranks in ((4, before), (STEPS, after)):
        code, output = torchrun(tmp_path, steps, "none", ranks, 0, "tests.faults.staged_job")
        assert code == 0, output
    check(tmp_path, after, 0)
