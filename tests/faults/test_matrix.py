"""The fault matrix in its quick form; ``make faults`` runs all of it."""

import os
import re
from pathlib import Path

import pytest

import fshard as fs
from tests.faults.job import Kill
from tests.faults.matrix import FIRST_RANK, PHASES, Bench, killed
from tests.faults.spoil import Row, files

pytestmark = pytest.mark.processes

QUICK = {"backward": 1, "save: rename": 0}
"""Phases and ranks of ``make test``."""


@pytest.fixture(scope="module")
def bench() -> Bench:
    """What cases share."""
    return Bench()


@pytest.mark.parametrize("phase", QUICK)
def test_a_rank_that_is_killed(bench: Bench, phase: str) -> None:
    row = Row(phase)
    killed(bench, row, Kill(QUICK[phase], *(PHASES | FIRST_RANK)[phase], child=phase == "backward"))
    assert not row.problems
    assert (row.cases, row.torn, row.restored, row.exact, row.lost) == (1, 0, 1, 1, 0)


def test_files_and_folders() -> None:
    rows = files(each=1)
    assert not [problem for row in rows for problem in row.problems or []]
    for row in rows:
        assert row.torn == 0 and row.restored == row.exact == row.cases
        assert row.cases or (os.getuid() and "skipped" in row.name)


def test_no_clock_that_can_step_back_is_read() -> None:
    """Order is by step, waits are by the monotonic clock: setting the wall's clock back can change nothing."""
    dates = r"\b(utc)?now\(|\btoday\(|localtime|st_[acm]time|get[acm]time"
    reads = re.compile(rf"\btime\.time(_ns)?\b|time import .*\btime\b|{dates}")
    for file in Path(fs.__file__).parent.rglob("*.py"):
        if file.name in ("mapped_file.py", "link_tests.py") or file.parent.name == "tracking":  # times that people read
            continue
        found = reads.search(file.read_text())
        assert found is None, f"{file} reads {found}"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES | FIRST_RANK)
def test_each_rank_at_each_phase(bench: Bench, phase: str, rank: int) -> None:
    if rank and phase in FIRST_RANK:
        pytest.skip("the first rank does this alone")
    row = Row(phase)
    killed(bench, row, Kill(rank, *(PHASES | FIRST_RANK)[phase]))
    assert not row.problems
    assert (row.cases, row.torn, row.restored, row.exact, row.lost) == (1, 0, 1, 1, 0)
