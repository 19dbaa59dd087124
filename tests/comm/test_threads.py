"""Threads of the package do not end by exceptions, and what they touch may be closed meanwhile."""

import importlib.util
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fshard.errors import CommError
from fshard.runtime.comm import devices, gloo, nccl, processes, shared_memory, stacks, watchdog
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.gloo import GlooCommunicator
from fshard.runtime.comm.links import PeerLink
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.shared_memory import SharedMemory
from fshard.runtime.comm.watchdog import LAST, Watchdog
from fshard.runtime.flight.recorder import Flight
from fshard.threads import Supervisor, say, started
from fshard.tracking.tracker import Guard

FAILURES = (OSError, RuntimeError, KeyError, SystemExit, KeyboardInterrupt, MemoryError, UnicodeError, CommError)


def until(come: Callable[[], bool]) -> None:
    """Wait until something has come about."""
    deadline = time.monotonic() + 8.0
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def looking(timeout: float = 0.04) -> Iterator[Watchdog]:
    """A watchdog whose thread looks every few milliseconds."""
    found = Watchdog(0, timeout, lambda reason: None)
    found.start()
    try:
        yield found
    finally:
        found.close()


def test_a_look_that_fails_does_not_end_the_watchdog(capfd: pytest.CaptureFixture[str]) -> None:
    """Any exception, in any order; each class is told once."""
    kinds = [kind for _ in range(8) for kind in random.Random(7).sample(FAILURES, len(FAILURES))]

    def fails() -> None:
        raise kinds.pop()("no") if kinds else KeyError("no")

    with looking() as found:
        found.looks.append(fails)
        until(lambda: not kinds)
        assert found.thread is not None and found.thread.is_alive()
    lines = capfd.readouterr().err.splitlines()
    assert sorted({line.split(": ")[2] for line in lines}) == sorted({kind.__name__ for kind in FAILURES})
    assert len(lines) == len(FAILURES) and all("who waits for whom" in line for line in lines)


class Closed:
    """A standard error that has been closed."""

    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


class Broken(Closed):
    """A standard error that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("out", [Closed(), Broken(), None])
def test_nothing_is_raised_where_standard_error_is_gone(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out)
    say("a line")
    error = Supervisor("a thread").attempt(lambda: int("x"))
    assert isinstance(error, ValueError)


def test_a_removed_working_directory_does_not_end_a_call_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "test_threads.py" in call_site()


def test_modules_are_looked_at_while_others_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dictionary of modules changes at each look, and lazy modules and objects without attributes are in it."""
    lazy, numbers = types.ModuleType("lazy"), itertools.count()
    lazy.__class__ = importlib.util._LazyModule

    class Imports:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("asked")

    class Slots:
        __slots__ = ()

    class File(str):
        """A name that is compared with, while another module arrives."""

        def __eq__(self, other: object) -> bool:
            sys.modules[f"arrives_{next(numbers)}"] = types.ModuleType("arrives")
            return False

        __hash__ = str.__hash__

    monkeypatch.setattr(sys, "modules", sys.modules | {"a": lazy, "b": Imports(), "c": Slots()})
    assert stacks._module.__wrapped__(File("/nowhere.py")) == ""
    assert next(numbers) > 10


def test_stacks_are_read_only_where_something_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(watchdog, "op_of", lambda thread: looks.append(thread) or "op 1")
    monkeypatch.setattr(watchdog, "place", lambda thread: "here")
    flight = Flight(0, 2)
    monkeypatch.setattr(Flight, "leave", lambda *args, **kwargs: "")
    found = Watchdog(0, 40.0, lambda reason: None, flight=flight)
    for number in range(200):  # a program that goes on
        flight.runs.append(types.SimpleNamespace(number=number, times=[], ops=[]))  # type: ignore[arg-type]
        found.look()
    assert not looks
    for _ in range(100):  # one that stands still for 100 seconds: looks after 10, 20, 40 and 80
        found.look()
    assert len(looks) == 4


def test_a_wait_that_ends_while_the_store_is_asked_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(watchdog, "place", lambda thread: "here")
    for ends in (True, False):
        found = Watchdog(0, 1.0, lambda reason: None)
        with suppress(KeyError), found.waiting("all-gather", 1):

            def asked(key: str, found: Watchdog = found, ends: bool = ends) -> str:
                if ends and found.seen[threading.get_ident()].seconds > 1.0 + LAST:
                    found.waits.clear()
                return ""

            monkeypatch.setattr(found.notes, "reason_of", asked)
            while found.waits and not ended:
                found.look()
        assert bool(ended) is not ends


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_gather": lambda comm, x: comm.all_gather(x, x[:2].clone()),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x[:2], x, x, False),
    "all_to_all_single": lambda comm, x: comm.reduce_scatter(x[:2].double(), x, x.double(), False),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x, x, None, None),
}


class Recorder:
    """A process group that notes what is called on it, and is one of two ranks."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups

    def rank(self) -> int:
        """The first of two ranks."""
        return 0

    def issued(self, *args: Any, group: Any = "its group", **kwargs: Any) -> Any:
        """A collective, or a message."""
        self.groups.append(group)
        return types.SimpleNamespace(wait=lambda: None)

    send = recv = issued


def gloo_communicator(groups: list[Any]) -> GlooCommunicator:
    return GlooCommunicator("c", 2, Recorder(groups), Watchdog(0, 5.0, lambda reason: None), [0, 1])


def nccl_communicator(groups: list[Any]) -> NcclCommunicator:
    return NcclCommunicator("c", 2, "its group", Stream(), "7")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [nccl, gloo])
@pytest.mark.parametrize("call", CALLS)
def test_a_communicator_that_is_closed_meanwhile_never_takes_the_default_group(
    module: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes it between any two of its lines; ``group=None`` is the default group of torch."""
    groups: list[Any] = []
    make, issued = (nccl_communicator if module is nccl else gloo_communicator), Recorder(groups).issued
    if module is nccl:
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            monkeypatch.setattr(nccl, name, lambda *args: issued(group=args[-1]))
    else:
        for name in ("all_reduce", "all_to_all_single"):
            monkeypatch.setattr(gloo.dist, name, issued)
    closers = refused = 0
    for line in range(60):
        comm, lines = make(groups), itertools.count()

        def trace(frame: Any, event: str, arg: Any, comm: Any = comm, lines: Any = lines, line: int = line) -> Any:
            inside = frame.f_code.co_filename == module.__file__ and not comm.closed
            if inside and event == "line" and next(lines) == line:
                sys.settrace(None)
                comm.close("by another thread")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            CALLS[call](comm, torch.zeros(4)).wait()
        except CommError as error:
            refused += "closed: by another thread" in str(error)
        finally:
            sys.settrace(before)
        closers += bool(comm.closed)
    assert closers > 2 and refused > 1 and None not in groups and groups


def test_two_threads_that_close_a_mesh_never_destroy_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes between any two lines of the other; ``destroy_process_group(None)`` ends the default group."""
    ended: list[Any] = []
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.dist, "destroy_process_group", ended.append)
    for line in range(20):
        transport, lines = object.__new__(processes.ProcessTransport), itertools.count()
        transport.groups, transport.cuts, comm = (
            [],
            types.SimpleNamespace(tell=print, drop_graphs=print),
            gloo_communicator([]),
        )

        def trace(frame: Any, event: str, arg: Any, comm: Any = comm, lines: Any = lines, line: int = line) -> Any:
            if frame.f_code.co_filename == processes.__file__ and event == "line" and next(lines) == line:
                sys.settrace(None)
                comm.close("by another thread")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            transport._drop([comm], "by this thread")
        finally:
            sys.settrace(before)
    assert ended and None not in ended


def test_a_link_that_two_threads_close_closes_each_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second time the number may be another file's. Between any two lines of the one comes the other."""
    closed: list[int] = []
    monkeypatch.setattr(shared_memory.os, "close", lambda file: (closed.append(file), real(file))[1])
    for line in range(30):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = SharedMemory([None, PeerLink(here)], [0, 1], Watchdog(0, 5.0, print))
        memory._memory(1 << 13), memory._memory(1 << 14)
        closed.clear()
        lines = itertools.count()

        def trace(frame: Any, event: str, arg: Any, memory: Any = memory, lines: Any = lines, line: int = line) -> Any:
            if frame.f_code.co_filename == shared_memory.__file__ and event == "line" and next(lines) == line:
                sys.settrace(None)
                memory.close("by another thread")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            memory.close("by this thread")
        finally:
            sys.settrace(before)
            there.close()
        assert len(closed) == len({*closed}) == 2 and memory.closed, line
        with pytest.raises(ConnectionError, match="it is closed: by "):
            memory.publish(0, b"g", {1: torch.zeros(1)})


real = os.close


class Stream:
    """A stream that does nothing."""

    @contextmanager
    def after(self, events: object) -> Iterator[None]:
        """Nothing to wait for."""
        yield


def test_a_closed_communicator_says_so_before_it_has_no_group() -> None:
    comm = NcclCommunicator("c", 2, "its group", Stream(), "7")  # type: ignore[arg-type]
    seen: list[str] = []

    class Watching(NcclCommunicator):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "group" and value is None:
                seen.append(self.closed)
            super().__setattr__(name, value)

    comm.__class__ = Watching
    assert comm.close("a reason") == "its group"
    assert seen == ["a reason"]
    with pytest.raises(CommError, match="a reason"):
        comm.all_reduce(torch.zeros(2))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_remote_tracker_that_ends_its_thread_is_told_and_drops_nothing_without_a_word(kind: type) -> None:
    class Remote:
        remote = True

        def begin(self, step: int, config: object) -> None:
            raise kind("server said no")

        def log(self, step: int, scalars: object) -> None:
            pass

        def close(self) -> None:
            pass

    guard = Guard(Remote())
    with pytest.warns(UserWarning, match=f"has failed and gets no more records: {kind.__name__}: server said no"):
        guard.begin(1, {})
        guard.end()
        guard.join(time.monotonic() + 8.0)
    assert guard._thread is not None and not guard._thread.is_alive()


def test_a_guard_of_devices_that_cannot_be_made_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "set_cuda_device_guard", fails)
    with pytest.raises(RuntimeError, match="no driver"):
        bounded(devices.keep_device_guard.__wrapped__, 5.0, "the guard")


def test_a_call_for_which_there_is_no_thread_is_one_that_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread while the interpreter ends."""

    def refuses(thread: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(TimeoutError, match="a question was not begun: can't create new thread"):
        bounded(lambda: 1, 5.0, "a question")
    with pytest.raises(RuntimeError):
        started(lambda: None, "a thread")


SAVES = """
import sys, threading, time, torch
import fshard as fs
from fshard.checkpoint import checkpointer
real = checkpointer.write_and_commit
def late(*args):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    return real(*args)
checkpointer.write_and_commit = late
plan = fs.make_plan({"w": torch.ones(3, 2)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
state = fs.init_state(plan, fs.optim.adamw(3e-4), params={"w": torch.ones(3, 2)})
checkpoints = fs.Checkpointer(sys.argv[1], async_=True)
checkpoints.save(state)
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_save_that_is_under_way_when_the_program_ends_is_written(tmp_path: Path) -> None:
    """Its files are hashed by a pool of threads, and the end of the interpreter starts none."""
    import fshard as fs

    done = subprocess.run([sys.executable, "-c", SAVES, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert not done.returncode and not done.stderr, done.stderr
    assert fs.Checkpointer(tmp_path).steps() == [0]
