"""What NCCL does and gloo never shows: waits return before the data are there, and failures come late or never.

A device that waits for a collective which never ends is one whose reads never return. Here such a read raises, so that
a test that would hang on hardware fails.
"""

import dataclasses
import datetime
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import CommError, PeerError
from fshard.played.cooperative import playing
from fshard.runtime.comm import COLLECTIVES, processes
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.processes import ProcessTransport
from fshard.runtime.steps import readings as device
from tests.shared.summed import Summed


class HangError(BaseException):
    """A read of the device that would never return."""


@dataclass(eq=False)
class Device:
    """The queue of one rank's device: collectives of the program that were issued and are not over.

    Attributes:
        waiting: their handles.
        aborted: why they were ended.
        control: exchanges on the control communicator.
    """

    waiting: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    control: int = 0

    def read(self) -> None:
        """Read a number: it comes after everything that was issued."""
        for handle in self.waiting:
            if not handle.arrived():
                raise HangError("a read of the device waits for a collective that never ends")
            handle.wait()
        self.waiting.clear()


@dataclass(frozen=True)
class Behind:
    """A communicator whose waits return at once; the data come when the device is read."""

    inner: Any
    device: Device

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.inner.size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            handle = Issued(getattr(self.inner, name)(*args, **kwargs))
            self.device.waiting.append(handle)
            return handle

        return call


@dataclass(frozen=True)
class Issued:
    """A collective on the device: the host does not wait for it."""

    inner: Any

    def wait(self) -> None:
        """Return at once."""

    def arrived(self) -> bool:
        """Whether all ranks have come."""
        return self.inner.collective.complete


@dataclass(frozen=True)
class AsynchronousTransport:
    """A transport whose collectives of programs behave as on NCCL."""

    inner: Any
    device: Device
    asynchronous: bool = True

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """Collectives of the program run behind the host; others as they are, and messages are counted."""
        comm = self.inner.communicator(role, axes)
        if role == "control":
            self.device.control += 1
        return Behind(comm, self.device) if role == COLLECTIVES else comm

    def program(self) -> AbstractContextManager[object]:
        """Reads of this device never wait: they raise."""
        return nullcontext()

    def abort(self, role: str, reason: str = "the step failed") -> None:
        """End what waits for other ranks."""
        self.device.aborted.append(reason)
        self.device.waiting.clear()
        thread = playing()
        assert thread is not None
        for key in [key for key in thread.scheduler.logs if key[0] == role]:
            del thread.scheduler.logs[key]

    def abort_all(self, reason: str) -> str:
        """End everything."""
        return self.inner.abort_all(reason)


def ranks_of(body: Callable[[fs.Mesh, Device], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run a function on two ranks with devices behind their hosts."""
    devices: dict[int, Device] = {}
    reading = device.read

    def read(values: Any) -> Any:
        devices[threading.get_ident()].read()
        return reading(values)

    monkeypatch.setattr(device, "read", read)

    def rank() -> Any:
        mesh, mine = fs.make_mesh((2,), ("shard",)), Device()
        devices[threading.get_ident()] = mine
        return body(dataclasses.replace(mesh, transport=AsynchronousTransport(mesh.transport, mine)), mine)

    return fs.virtual_mesh((2,), ("shard",)).run(rank)


def steps(mesh: fs.Mesh, mine: Device) -> list[str]:
    """A good step, one that rank 1 fails, and a good one: what each came to."""
    params = {"w": torch.ones(4)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
    opt, out, loss = fs.optim.sgd(0.1), [], Summed()
    state, step = fs.init_state(plan, opt, params=params), fs.make_train_step(loss, opt, plan)
    for number in range(3):
        loss.bad = number == 1 and mesh.rank == 1
        try:
            state, metrics = step(state, torch.ones(2, 4))
            out.append(f"{metrics.loss.item():.4f}")
        except (PeerError, ValueError) as error:
            out.append(type(error).__name__)
    return [*out, *mine.aborted[:1]]


@pytest.mark.long
def test_ranks_learn_of_a_failure_before_they_read_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks_of(steps, monkeypatch)
    assert first[1] == "PeerError" and second[1] == "ValueError"
    assert first[0] == second[0] and first[2] == second[2]
    assert "another rank" in first[3] and "no data here" in second[3]


def test_without_that_a_rank_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fshard.runtime.steps.protocol.foretold", lambda *args: None)
    with pytest.raises(HangError):
        ranks_of(steps, monkeypatch)


class Group:
    """NCCL's process group: what is told to it, and how long an abort takes."""

    group_name = "7"

    def __init__(self, seconds: float = 0.0, error: str = "") -> None:
        self.seconds, self.error, self.aborts = seconds, error, 0

    def abort(self) -> None:
        """End what is in flight."""
        self.aborts += 1
        time.sleep(self.seconds)
        if self.error:
            raise RuntimeError(self.error)


def joined(group: Any) -> ProcessTransport:
    """A transport with an NCCL communicator for the program, and one for a schedule."""
    mesh = fs.abstract_mesh((2,), ("shard",))
    transport = ProcessTransport(mesh, "nccl", datetime.timedelta(seconds=5), False)
    for role in (COLLECTIVES, "all_gather"):
        comm = NcclCommunicator(role, 2, group if role == COLLECTIVES else Group(), Stream())
        transport.comms[role, ("shard",)] = comm
        transport.groups.append(comm.group)
    return transport


def test_a_failure_aborts_the_collectives_of_the_program_alone() -> None:
    group = Group()
    transport = joined(group)
    assert transport.asynchronous
    comm, other = transport.comms[COLLECTIVES, ("shard",)], transport.comms["all_gather", ("shard",)]
    transport.abort(COLLECTIVES, "rank 1 failed")
    assert group.aborts == 1 and (COLLECTIVES, ("shard",)) not in transport.comms and group not in transport.groups
    with pytest.raises(CommError, match="all-reduce on collectives failed: it is closed: rank 1 failed"):
        comm.all_reduce(torch.ones(1))
    assert isinstance(other, NcclCommunicator) and other.group.aborts == 0 and not other.closed
    transport.abort_all("lost")
    assert other.group is None and other.closed == "lost" and group.aborts == 1


@pytest.mark.parametrize("group", [Group(30.0), Group(0.0, "unhandled cuda error")])
def test_closing_never_hangs(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DROPPING", 0.1)
    transport, began = joined(group), time.monotonic()
    transport.close("ValueError: this rank failed")
    assert group.aborts == 1 and time.monotonic() - began < 5
    transport.close("again")
    assert group.aborts == 1


class Waiting(Group):
    """Ends its kernels at once, and then waits for those of all groups, as CUDA does where an abort frees memory."""

    def __init__(self, ended: threading.Barrier, error: str = "") -> None:
        super().__init__()
        self.ended, self.error = ended, error

    def abort(self) -> None:
        """Wait for the kernels of the others."""
        self.ended.wait(20)
        super().abort()


@pytest.mark.parametrize("error", ["", "unhandled cuda error"])
def test_communicators_are_aborted_together(error: str) -> None:
    """One after the other, the first would wait for a kernel of the second, which nothing ends."""
    ended = threading.Barrier(3)
    groups = [Waiting(ended, error), Waiting(ended), Waiting(ended)]
    transport = joined(groups[0])
    for axis, group in zip(("one", "other"), groups[1:], strict=True):
        transport.comms[COLLECTIVES, (axis,)] = NcclCommunicator(axis, 2, group, Stream())
    began = time.monotonic()
    transport.abort(COLLECTIVES, "rank 1 failed")
    assert [group.aborts for group in groups] == [1, 1, 1] and time.monotonic() - began < processes.DROPPING


def test_a_good_close_leaves_what_is_in_flight_to_end() -> None:
    group = Group()
    joined(group).close()
    assert group.aborts == 0


class Broken:
    """A collective that was issued well, and fails when it is waited for."""

    def wait(self) -> None:
        """Tell of what happened on the device."""
        raise RuntimeError("NCCL communicator was aborted on rank 1.\nmore")


def test_errors_that_come_late_name_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fshard.runtime.comm.nccl.all_gather", lambda out, shard, group: Broken())
    monkeypatch.setattr("fshard.runtime.comm.nccl.reduce_scatter", lambda out, full, group: Broken())
    for call in ("all_to_all", "all_reduce"):
        monkeypatch.setattr(f"fshard.runtime.comm.nccl.{call}", lambda *args: Broken())
    comm, out, full = NcclCommunicator("all_gather", 2, Group(), Stream()), torch.zeros(2), torch.ones(4)
    handles = {
        "all-gather": comm.all_gather(full, out),
        "reduce-scatter": comm.reduce_scatter(out, full, torch.empty(4), True),
        "all-reduce": comm.all_reduce(out),
        "all-to-all": comm.all_to_all(full, full, None, None),
    }
    handles["reduce-scatter of rows"] = comm.reduce_scatter(out, full.bfloat16(), full.bfloat16(), True)
    for name, handle in handles.items():
        with pytest.raises(
            CommError, match=f"{name.removesuffix(' of rows')} on all_gather failed: NCCL comm.* rank 1.$"
        ):
            handle.wait()
    assert not out.any(), "what has not arrived is not added"


def test_errors_of_nccl_name_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("NCCL error in: ncclSystemError\nmore")

    monkeypatch.setattr("fshard.runtime.comm.nccl.all_reduce", fails)
    with pytest.raises(CommError, match="all-reduce on all_gather failed: NCCL error in: ncclSystemError$"):
        NcclCommunicator("all_gather", 2, Group(), Stream()).all_reduce(torch.ones(1))
