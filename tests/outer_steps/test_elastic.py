"""Replicas that end and come back: torchrun starts them, the train loop resumes them."""

from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from tests.faults.test_elastic import report, torchrun
from tests.outer_steps.cases import trained
from tests.outer_steps.elastic_job import CASE

pytestmark = [pytest.mark.processes, pytest.mark.slow]
JOB = "tests.outer_steps.elastic_job"


def test_a_killed_replica_is_started_again_and_all_resume(tmp_path: Path) -> None:
    """From the last checkpoint, with a fragment under way: the end is that of a run without faults, bit for bit."""
    code, output = torchrun(tmp_path, 8, "SIGKILL", 2, 1, JOB)
    assert code == 0, output
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    for rank, (_, *want) in enumerate(mesh.run(lambda: trained(CASE, mesh, 8))):
        found = report(tmp_path, rank, 1)
        assert found["made"] == [5, 6, 7, 8]
        assert found["ended"] == [{path: leaf.tolist() for path, leaf in one.items()} for one in want]


def test_a_replica_that_comes_back_later_starts_from_the_anchor(tmp_path: Path) -> None:
    """It is killed, the other goes on alone, and then there are two again."""
    code, output = torchrun(tmp_path, 8, "SIGKILL", 2, 0, JOB)
    assert code != 0, output
    code, output = torchrun(tmp_path, 8, "none", 1, 0, JOB)
    assert code == 0, output
    alone = report(tmp_path, 0, 0)
    assert alone["made"] == [5, 6, 7, 8]
    code, output = torchrun(tmp_path, 12, "none", 2, 0, JOB)
    assert code == 0, output
    found: list[dict[str, Any]] = [report(tmp_path, rank, 0) for rank in range(2)]
    assert [each["made"] for each in found] == [[9, 10, 11, 12]] * 2
    (own, anchor), (new, same) = (each["begun"] for each in found)
    assert [own, anchor] == alone["ended"] and new == same == anchor and own != anchor
    assert found[0]["ended"][1] == found[1]["ended"][1] != anchor and found[0]["ended"][0] != found[1]["ended"][0]
