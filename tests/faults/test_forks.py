"""A forked child owns nothing of its parent: calls in it raise, and whatever it does, the parent's job goes on."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from fshard.forks import Forks, own
from tests.faults import forks
from tests.shared.workers import Pools

REMEDY = "start processes by multiprocessing's 'spawn' or 'forkserver'"
"""What every error of a child says."""


@pytest.mark.parametrize("shared_memory", [True, False])
def test_calls_in_children_raise_and_the_parents_go_on(pool: Pools, shared_memory: bool, tmp_path: Path) -> None:
    right = pool(2).run(forks.undisturbed, str(tmp_path / "right"), shared_memory)
    for told, losses in pool(2).run(forks.calls_in_children, str(tmp_path / "run"), shared_memory, 11):
        assert losses == right[0]
        for name, text in told:
            if name == "held":
                assert text == []
            elif name == "exit":
                assert text == "SystemExit: 3"
            else:
                assert REMEDY in text and text.startswith(("CommError", "CheckpointError")), (name, text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_calls_in_children_in_many_orders(pool: Pools, seed: int, tmp_path: Path) -> None:
    for told, losses in pool(2).run(forks.calls_in_children, str(tmp_path), bool(seed % 2), seed):
        assert len(losses) == 5
        assert all(REMEDY in text for name, text in told if name not in ("held", "exit"))


def test_programs_that_ranks_start_inherit_no_socket(pool: Pools, tmp_path: Path) -> None:
    for shared_memory in (True, False):
        folder = str(tmp_path / str(shared_memory))
        for before, after in pool(2).run(forks.sockets_in_a_program, folder, shared_memory):
            assert after == before


def test_a_child_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    assert forks.locked_by_a_child(str(tmp_path)) == "free"


def test_a_child_records_nothing_and_ends_its_parents_run_of_trackers_not(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with fs.track([fs.trackers.JsonLines(path)], fs.make_mesh((1,), ("data",))) as record:
        record(1, {"loss": 1.0})

        def child() -> None:
            record(2, {"loss": 5.0})
            record.close()

        assert forks.in_child(child) is None
        record(2, {"loss": 2.0})
    assert [row["loss"] for row in fs.trackers.read_lines(path)] == [1.0, 2.0]


def test_an_owner_that_fails_to_let_go_does_not_keep_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **callbacks: None)
    found, told = Forks(), []

    class Fails:
        def disown(self, why: str) -> None:
            told.append(why)
            raise RuntimeError("no")

    owners: list[Any] = [Fails(), Fails()]
    found.owners.update(owners)
    found.pid = 17
    found.forked()
    assert len(told) == 2 and f"process {os.getpid()}, which process 17 forked" in told[0]
    assert not found.owners and found.pid == os.getpid()


def test_owners_are_not_kept_alive() -> None:
    class Owner:
        def disown(self, why: str) -> None:
            pass

    owner = Owner()
    before = sys.getrefcount(owner)
    own(owner)
    assert sys.getrefcount(owner) == before
