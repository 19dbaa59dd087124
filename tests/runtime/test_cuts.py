"""A loss function that reads its device while another rank has failed: a note ends its wait, not NCCL's timeout.

Ranks are real processes. Their schedules use gloo; collectives of the program go to a group that stands for NCCL: its
waits return at once, and a read of the device returns when all ranks have come, or when the group is aborted.
"""

import datetime
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import fshard as fs
from fshard import P
from fshard.collectives import psum
from fshard.errors import CommError, PeerError
from fshard.runtime.comm import COLLECTIVES, cuts, nccl, processes
from fshard.runtime.comm.cuts import Cuts
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.processes import ProcessTransport
from fshard.runtime.comm.streams import Stream
from fshard.runtime.comm.watchdog import Watchdog
from tests.shared.workers import Pools

HANG = 20.0
"""Seconds after which a read of the device gives up, so that the test fails and does not hang."""


class Device:
    """A device behind its host: the collectives that it still waits for."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.waiting: list[Any] = []

    def read(self) -> None:
        """Read a number: it comes after all collectives, or when they are aborted."""
        began = time.monotonic()
        while self.waiting and not self.aborted.is_set():
            if self.waiting[0].is_completed():
                self.waiting.pop(0)
            elif time.monotonic() - began > HANG:
                raise TimeoutError("a read of the device waits for a collective that never ends")
            else:
                time.sleep(0.01)


class Group:
    """A process group of NCCL for collectives of a program. Its data go over gloo."""

    def __init__(self, group: Any, device: Device) -> None:
        self.group, self.device = group, device
        device.aborted.clear()
        device.waiting.clear()

    def abort(self) -> None:
        """The kernels that wait end."""
        self.device.aborted.set()


class Issued:
    """A collective on the device: the host does not wait for it."""

    def wait(self) -> None:
        """Return at once."""


def asynchronous(mesh: fs.Mesh, device: Device, change: pytest.MonkeyPatch) -> None:
    """Let collectives of programs run behind the host, as over NCCL."""
    transport: Any = mesh.transport
    make, real = transport._make, nccl.all_gather

    def made(role: str, axes: Any) -> Any:
        if role != COLLECTIVES:
            transport.backend = "gloo"
            try:
                return make(role, axes)
            finally:
                transport.backend = "nccl"
        group = transport._group(range(mesh.size), "gloo")
        return NcclCommunicator(role, mesh.size, Group(group, device), Stream())

    def all_gather(out: Tensor, shard: Tensor, group: Group) -> Any:
        device.waiting.append(real(out, shard, group.group))
        return Issued()

    change.setattr(transport, "backend", "nccl")
    change.setattr(transport, "_make", made)
    change.setattr(nccl, "all_gather", all_gather)
    change.setattr(processes.dist, "destroy_process_group", lambda group=None: None)
    change.setattr(cuts, "PATIENCE", 0.3)


def steps(notes: bool) -> list[tuple[str, float]]:
    """A good step, one that rank 1 fails before a collective after which rank 0 reads its device, and a good one."""
    out: list[tuple[str, float]] = []
    device, bad = Device(), False

    def loss(p: Any, x: Tensor) -> Tensor:
        if bad:
            raise ValueError("no data here")
        total = psum((p["w"].detach() * x).sum(), "shard")
        if not isinstance(x, FakeTensor):
            device.read()  # what ``total.item()`` does
        total = total + psum(total, "shard")
        return (p["w"] * x).square().mean() + 0 * total.detach().nan_to_num()

    with pytest.MonkeyPatch.context() as change, fs.make_mesh((2,), ("shard",), timeout=60) as mesh:
        asynchronous(mesh, device, change)
        if not notes:
            change.setattr(Cuts, "tell", lambda self, reason: None)
        params = {"w": torch.ones(4)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
        opt = fs.optim.sgd(0.1)
        state, step = fs.init_state(plan, opt, params=params), fs.make_train_step(loss, opt, plan)
        for number in range(3):
            bad, began = number == 1 and mesh.rank == 1, time.monotonic()
            try:
                state, metrics = step(state, torch.ones(2, 4))
                said = f"{metrics.loss.item():.4f}"
            except (PeerError, ValueError, TimeoutError) as error:
                said = f"{type(error).__name__}: {error}"
            out.append((said, time.monotonic() - began))
    return out


@pytest.mark.long
def test_a_read_of_the_device_ends_when_another_rank_has_failed(pool: Pools) -> None:
    first, second = pool(2).run(steps, True, timeout=100)
    assert first[1][0].startswith("PeerError") and "no data here" in first[1][0] and first[1][1] < HANG / 2
    assert second[1][0].startswith("ValueError")
    assert first[0][0] == second[0][0] and first[2][0] == second[2][0] and first[2][0][0].isdigit()


@pytest.mark.slow
def test_without_a_note_it_waits(pool: Pools) -> None:
    first, _ = pool(2).run(steps, False, timeout=100)
    assert first[1][1] > HANG / 2


def watched(notes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Cuts, list[str]]:
    """Cuts whose store is a dict, and what they abort."""
    watchdog, gone = Watchdog(0, 60.0, lambda reason: None), list[str]()
    monkeypatch.setattr(watchdog, "start", lambda: None)
    monkeypatch.setattr(watchdog.notes, "reason_of", lambda key: notes.get(key, ""))
    monkeypatch.setattr(watchdog.notes, "leave", notes.__setitem__)
    return Cuts(watchdog, 1, gone.append), gone


def test_only_a_program_that_takes_long_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, str] = {}
    mine, gone = watched(notes, monkeypatch)
    mine.tell("between programs")
    assert not notes
    with mine.program():
        mine.tell("ValueError: no data")
        mine.look()
        assert notes == {"start/failed/1": "rank 1 gave up: ValueError: no data"} and not gone
        monkeypatch.setattr(cuts, "PATIENCE", 0.0)
        mine.look()
        mine.look()
        assert gone == ["rank 1 gave up: ValueError: no data"]
    with mine.program():
        mine.look()
    mine.look()
    assert len(gone) == 1, "a note is that of one program"


def test_a_note_that_comes_when_the_program_is_over_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PATIENCE", 0.0)
    mine, gone = watched({"start/failed/1": "late"}, monkeypatch)
    inside = mine.program()
    inside.__enter__()

    def slow(key: str) -> str:
        inside.__exit__(None, None, None)  # the program ends while the store answers
        return "late"

    monkeypatch.setattr(mine.watchdog.notes, "reason_of", slow)
    mine.look()
    assert not gone


def test_looks_cost_nothing_over_gloo() -> None:
    transport = ProcessTransport(fs.abstract_mesh((2,), ("shard",)), "gloo", datetime.timedelta(seconds=5), False)
    with transport.program():
        assert transport.cuts.turn == 0 and transport.watchdog.thread is None
    transport.abort(COLLECTIVES, "nothing is told")
    with pytest.raises(CommError, match="lost"):
        transport.abort_all("lost")
        transport.communicator("all_gather", ("shard",))
