"""The end of a process after its error: soon, and with the status of the error, whatever its threads wait for."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.runtime.comm import ending, joining
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.descriptors import Descriptors
from fshard.runtime.comm.ending import Ending, left
from tests.faults.stuck import _free_port
from tests.shared.workers import PRELOAD

GRACE = 60.0
"""Seconds in which a process must have ended after its error, on a busy machine; one second where it is not."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An end that the interpreter does not know of, and that sees no thread that other tests have left."""
    threads, before = threading.enumerate, threading.enumerate()
    monkeypatch.setattr(threading, "enumerate", lambda: [one for one in threads() if one not in before])
    monkeypatch.setattr("atexit.register", lambda body: None)
    found = Ending()
    monkeypatch.setattr("fshard.runtime.comm.descriptors.ending", lambda: found)
    return found


def waiting_at_a_store(seconds: float = 0.05) -> Any:
    """A store whose key nobody sets, and a thread that waits for it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with Descriptors().opening():
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=60)
        )
    with pytest.raises(TimeoutError):
        bounded(lambda: store.get("never"), seconds, "a question to the store")
    return host, store


def test_threads_that_wait_at_a_store_end_first(fresh: Ending) -> None:
    host, store = waiting_at_a_store()
    assert left(0.0)
    began = time.monotonic()
    fresh.end()
    assert not left(0.0) and time.monotonic() - began < ending.LATE
    del host, store


def test_connections_stay_where_no_thread_waits(fresh: Ending) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with Descriptors().opening():
        store: Any = dist.TCPStore("127.0.0.1", host.port, is_master=False)  # type: ignore[attr-defined]
    fresh.end()
    store.set("here", "1")
    assert store.get("here") == b"1"


@pytest.mark.parametrize("failed", [False, True])
def test_a_thread_that_never_ends(fresh: Ending, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(ending, "LATE", 0.05)
    for name in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, name, ValueError() if failed else None, raising=False)
    stop = threading.Event()
    with pytest.raises(TimeoutError):
        bounded(stop.wait, 0.01, "this")
    fresh.end()
    stop.set()
    left(5.0)
    assert statuses == [1] * failed


def rank_of(rank: int, world: int, victim: int, where: str, port: int, folder: str) -> None:
    """A rank of a job that loses another one, and whose interpreter ends as that of a program does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    torch.set_num_threads(1)

    def die(*given: object) -> Any:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim and where != "step":
        setattr(joining, where, die)
    try:
        mesh = fs.make_mesh((-1,), ("data",), timeout=30.0)
        if rank == victim:
            die()
        while True:
            fs.collectives.psum(torch.ones(2), "data", mesh=mesh)
    except fs.errors.CommError as error:
        sys.last_value = error
        Path(folder, f"raised{rank}").write_text(f"{time.monotonic()} {error}")
    ctypes.pythonapi.Py_Exit(1)


def ends_of(world: int, victim: int, where: str, folder: Path) -> list[tuple[int, float, str]]:
    """The status of each survivor, for how long it lived after its error, and what it printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port()
    ranks = [
        context.Process(target=rank_of, args=(rank, world, victim, where, port, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = []
    for rank, process in enumerate(ranks):
        process.join(GRACE)
        ended = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            raised = float((folder / f"raised{rank}").read_text().split()[0])
            found.append((process.exitcode, ended - raised, (folder / f"log{rank}").read_text()))
        process.kill()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_survivors_end_soon_with_the_status_of_their_error(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    for number, where in enumerate(("_agreed", "_init", "step") if seed else ("_init",)):
        world, folder = drawn.choice((2, 3)) if seed else 3, tmp_path / str(number)
        folder.mkdir()
        ends = ends_of(world, drawn.randrange(world), where, folder)
        assert len(ends) == world - 1
        for status, seconds, printed in ends:
            assert status == 1 and seconds < GRACE and "terminate" not in printed, (where, status, seconds, printed)


def test_listening_sockets_are_left(fresh: Ending) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ending.shut_down(listening.fileno())
        with socket.create_connection(listening.getsockname()), listening.accept()[0]:
            pass
