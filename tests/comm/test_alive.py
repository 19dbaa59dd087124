"""Liveness notes: a rank that ends before any connection joins the ranks is named at once."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.errors import CommError
from fshard.runtime.comm import joining
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.joining import Alive, born, near
from tests.shared.workers import Pools


@pytest.fixture
def child() -> Any:
    """A process that sleeps."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def note(store: Any, rank: int, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the note of a rank that is another process."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        Alive(store, rank, 3)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_rank_that_has_come_and_ended_is_named(child: Any, reaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    found = Alive(store, 0, 3)
    assert found.missing() == [1, 2]
    note(store, 1, child.pid, monkeypatch)
    found.look()
    assert found.missing() == [2] and found.unread == [2]
    began = time.monotonic()
    child.send_signal(signal.SIGKILL)
    if reaped:
        child.wait()
    with pytest.raises(CommError, match=f"rank 1 has ended \\(process {child.pid} of this host\\)"):
        bounded(threading.Event().wait, 20.0, "the start of all ranks", found.look)
    assert time.monotonic() - began < 10.0


def test_a_process_with_the_number_of_one_that_has_ended_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Alive(dist.HashStore(), 0, 2)
    found.unread, found.processes = [], {1: f"{os.getpid()} 1"}
    with pytest.raises(CommError, match="rank 1 has ended"):
        found.look()
    assert born(os.getpid()) and not born(2**22 + 1)


def test_a_rank_of_another_host_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    found = Alive(store, 0, 2)
    store.set("fshard/came/1", "another host | 1 2")
    found.look()
    assert not found.processes and not found.unread and not found.missing()


@pytest.mark.parametrize("store", [None, object()])
def test_without_a_store_that_answers_nobody_is_missing(store: Any) -> None:
    found = Alive(store, 0, 2)
    found.look()
    assert found.missing() == []


@pytest.mark.parametrize(
    ("local", "size", "rank", "world", "ranks"),
    [("1", "4", 5, 8, [4, 5, 6, 7]), ("", "", 0, 3, [0, 1, 2]), ("", "", 0, 100, []), ("x", "4", 0, 2, [0, 1])],
)
def test_ranks_that_may_be_on_this_host(
    local: str, size: str, rank: int, world: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    assert list(near(rank, world)) == ranks


def test_ranks_that_never_come_are_named() -> None:
    store = dist.HashStore()
    alive = Alive(store, 0, 4)
    Alive(store, 2, 4)
    with pytest.raises(CommError, match=r"ranks 1, 3 did not come to fs.make_mesh within 0\.1 s"):
        joining._in_time(threading.Event().wait, 0.1 - joining.GRACE + joining.GRACE, alive)


def what_is_open() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def drop_meshes(shared_memory: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is open before meshes are made and used, and when nobody holds them any more."""
    before = what_is_open()
    for _ in range(3):
        mesh = fs.make_mesh((-1,), ("data",), timeout=20.0, shared_memory=shared_memory)
        plan = fs.make_plan({"w": torch.ones(3, 2)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        fs.unshard(fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(3, 2)}).params, plan)
        del mesh, plan
        gc.collect()
    deadline = time.monotonic() + 8.0  # a watchdog ends at its next look
    while (after := what_is_open()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, after


def test_a_dropped_mesh_keeps_no_thread_and_no_descriptor(pool: Pools) -> None:
    for shared_memory in (True, False):
        for before, after in pool(2).run(drop_meshes, shared_memory):
            assert after[0] <= before[0] and after[1] <= before[1], (before, after)


def test_files_of_a_process_are_read_as_linux_writes_them() -> None:
    assert born(os.getpid()) == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
