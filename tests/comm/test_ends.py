"""The end of a process after its error: soon, and with the status of the error, whatever its threads wait for."""

import os
import random
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fshard.runtime.comm import ending
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.ending import Descriptors, Ending, left
from tests.faults.lives import GRACE, survivors


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An end that the interpreter does not know of, and that sees no thread that other tests have left."""
    threads, before = threading.enumerate, threading.enumerate()
    monkeypatch.setattr(threading, "enumerate", lambda: [one for one in threads() if one not in before])
    monkeypatch.setattr("atexit.register", lambda body: None)
    found = Ending()
    monkeypatch.setattr("fshard.runtime.comm.ending.ending", lambda: found)
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


@pytest.mark.processes
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_survivors_end_soon_with_the_status_of_their_error(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    for number, where in enumerate(("_agreed", "_init", "step") if seed else ("_init",)):
        world, folder = drawn.choice((2, 3)) if seed else 3, tmp_path / str(number)
        folder.mkdir()
        ends = survivors(world, drawn.randrange(world), where, folder)
        assert len(ends) == world - 1
        for end in ends:
            assert end.status == 1 and end.lived < GRACE and "terminate" not in end.printed, (where, end)


def test_listening_sockets_are_left(fresh: Ending) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ending.shut_down(listening.fileno())
        with socket.create_connection(listening.getsockname()), listening.accept()[0]:
            pass
