"""A program that reads its device while another rank has failed: a note ends its wait, not NCCL's timeout.

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
from fshard.runtime.comm import COLLECTIVES, device_release, nccl, processes
from fshard.runtime.comm.device_release import Cuts
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.processes import ProcessTransport
from fshard.runtime.comm.watchdog import Watchdog
from fshard.runtime.steps import readings
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
        return NcclCommunicator(role, mesh.size, Group(group, device), Stream(), group.group_name)

    def all_gather(out: Tensor, shard: Tensor, group: Group) -> Any:
        device.waiting.append(real(out, shard, group.group))
        return Issued()

    change.setattr(transport, "backend", "nccl")
    change.setattr(transport, "_make", made)
    change.setattr(nccl, "all_gather", all_gather)
    change.setattr(processes.dist, "destroy_process_group", lambda group=None: None)
    change.setattr(device_release, "PATIENCE", 0.3)


def mean(p: Any, x: Tensor) -> Tensor:
    """A loss without collectives."""
    return (p["w"] * x).square().mean()


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
            change.setattr(Cuts, "tell", lambda self, closed, reason: None)
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


def regions() -> list[tuple[str, float]]:
    """The same outside of steps, in ``shard_map`` and in ``use_mesh``: good calls, and between them one that fails."""
    out: list[tuple[str, float]] = []
    device = Device()

    def total(x: Tensor, bad: bool) -> Tensor:
        if bad:
            raise ValueError("no data here")
        total = psum(x, "shard")
        device.read()
        return total

    def mapped(bad: bool) -> Tensor:
        f = fs.shard_map(lambda x: total(x, bad), mesh, P("shard"), P("shard"), slices=True)
        return f(torch.ones(1))

    def within(bad: bool) -> Tensor:
        with fs.collectives.use_mesh(mesh):
            return total(torch.ones(1), bad)

    with pytest.MonkeyPatch.context() as change, fs.make_mesh((2,), ("shard",), timeout=60) as mesh:
        asynchronous(mesh, device, change)
        for region in (mapped, within):
            for number in range(3):
                bad, began = number == 1 and mesh.rank == 1, time.monotonic()
                try:
                    region(bad)
                    said = "good"
                except (CommError, ValueError, TimeoutError) as error:
                    said = f"{type(error).__name__}: {error}"
                out.append((said, time.monotonic() - began))
    return out


@pytest.mark.long
def test_so_it_is_outside_of_steps(pool: Pools) -> None:
    first, second = pool(2).run(regions, timeout=100)
    good = [number for number in range(6) if number not in (1, 4)]
    assert [first[number][0] for number in good] == [second[number][0] for number in good] == ["good"] * 4
    for number in (1, 4):
        said, seconds = first[number]
        assert said.startswith("CommError") and "rank 1 gave up: ValueError: no data here" in said
        assert seconds < HANG / 2 and second[number][0].startswith("ValueError")


def watched(notes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Cuts, NcclCommunicator]:
    """Cuts whose store is a dict, and the communicator that it watches."""
    watchdog, comm = Watchdog(0, 60.0, lambda reason: None), NcclCommunicator("c", 2, None, Stream(), "7")
    monkeypatch.setattr(watchdog, "start", lambda: None)
    monkeypatch.setattr(watchdog.notes, "reason_of", lambda key: notes.get(key, ""))
    monkeypatch.setattr(watchdog.notes, "leave", notes.__setitem__)
    return Cuts(watchdog, 1, lambda: {"c": [comm]}, lambda role, comms, reason: comms[0].close(reason)), comm


def test_only_a_program_that_takes_long_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, str] = {}
    mine, comm = watched(notes, monkeypatch)
    mine.tell([comm], "ValueError: no data")
    assert notes == {"start/failed/7": "rank 1 gave up: ValueError: no data"}
    monkeypatch.setattr(device_release, "PATIENCE", 0.05)
    mine.look()
    with mine.program():
        mine.look()
        with mine.program():
            time.sleep(0.1)
        mine.look()  # a program inside of it has just ended
        assert not comm.closed
    with pytest.raises(
        CommError, match="the device waited for a rank that has failed: rank 1 gave up: ValueError: no data"
    ):
        with mine.program():
            time.sleep(0.1)
            mine.look()
            assert comm.closed == "rank 1 gave up: ValueError: no data"
    with mine.program():
        time.sleep(0.1)
        mine.look()
    mine.tell([comm], "again")
    assert notes["start/failed/7"].endswith("no data"), "what is closed was told"


def test_a_note_that_comes_when_the_program_is_over_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_release, "PATIENCE", 0.0)
    mine, comm = watched({"start/failed/7": "late"}, monkeypatch)
    inside = mine.program()
    inside.__enter__()

    def slow(key: str) -> str:
        inside.__exit__(None, None, None)  # the program ends while the store answers
        comm.close("the step failed")
        return "late"

    monkeypatch.setattr(mine.watchdog.notes, "reason_of", slow)
    mine.look()
    assert comm.closed == "the step failed" and not mine.told


def test_looks_cost_nothing_over_gloo() -> None:
    transport = ProcessTransport(fs.abstract_mesh((2,), ("shard",)), "gloo", datetime.timedelta(seconds=5), False)
    with transport.program():
        assert transport.cuts.since == float("inf") and transport.watchdog.thread is None
    transport.abort(COLLECTIVES, "nothing is told")
    with pytest.raises(CommError, match="lost"):
        transport.abort_all("lost")
        transport.communicator("all_gather", ("shard",))


def lost() -> tuple[str, float, str]:
    """A device that is lost at the end of a step, while that of the other rank waits for a reduction."""
    device = Device()
    with pytest.MonkeyPatch.context() as change, fs.make_mesh((2,), ("shard",), timeout=60) as mesh:
        asynchronous(mesh, device, change)
        params = {"w": torch.ones(4)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
        opt = fs.optim.sgd(0.1)
        state, step = fs.init_state(plan, opt, params=params), fs.make_train_step(mean, opt, plan)
        state, _ = step(state, torch.ones(2, 4))
        group = mesh.transport._group((0, 1), "gloo")
        late = NcclCommunicator("reduce_scatter", 2, Group(group, device), Stream(), group.group_name)
        mesh.transport.comms["reduce_scatter", ("late",)] = late

        def read(values: Any) -> Any:
            if mesh.rank == 1:
                raise torch.AcceleratorError("CUDA error: the GPU has fallen off the bus")
            late.all_gather(torch.empty(2), torch.ones(1))
            device.read()
            return iter([0.0] * len(values))

        change.setattr(readings, "read", read)
        began, said = time.monotonic(), []
        for _ in range(2):
            try:
                step(state, torch.ones(2, 4))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said[0], time.monotonic() - began, said[1]


@pytest.mark.long
def test_a_device_that_is_lost_ends_the_reads_of_others(pool: Pools) -> None:
    first, second = pool(2).run(lost, timeout=100)
    assert first[0].startswith("CommError") and "rank 1 gave up: AcceleratorError" in first[0] and first[1] < HANG / 2
    assert second[0].startswith("AcceleratorError: CUDA error") and second[1] < HANG / 2
    assert all("no rank of this mesh can be reached" in said or "closed" in said for _, _, said in (first, second))
