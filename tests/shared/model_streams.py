"""The runtime's streams, NCCL's process groups and copies as those of a model by vector clocks."""

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import fshard as fs
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.execution.wires import JointHandle
from fshard.schedule.infos import stage_numel
from tests.shared.clocks import Clocks, Mark, caller


@dataclass
class ModelStream(Stream):
    """A side stream of the model: what ``CudaStream`` does."""

    clocks: Clocks
    name: str
    asynchronous = True

    def record(self, event: Any = None) -> Any:
        """An event after the current stream's work."""
        return self.clocks.record()

    @contextmanager
    def _issued(self, after: Iterable[Any]) -> Iterator[None]:
        for mark in after:
            if mark is not None:
                self.clocks.captures(mark, "")
                self.clocks.join(self.name, mark.clock)
        with self.clocks.on(self.name):
            yield

    def after(self, after: Iterable[Any]) -> AbstractContextManager[object]:
        """Inside, work is issued on this stream, after the events."""
        return self._issued(after)

    def wait_for(self, after: Iterable[Any]) -> None:
        """The current stream waits."""
        for mark in after:
            if mark is not None and self.clocks.does(f"wait: {caller()}"):
                self.clocks.captures(mark, "")
                self.clocks.join(self.clocks.current, mark.clock)


@dataclass(frozen=True)
class ModelCompute:
    """A compute stream of the model."""

    name: str
    clocks: Clocks = field(compare=False, repr=False)

    def wait_stream(self, other: "ModelCompute") -> None:
        """This stream waits for all that the other was given."""
        if self.clocks.does(f"wait for another compute stream: {caller()}"):
            self.clocks.captures(None, "another compute stream is waited for in a capture")
            self.clocks.join(self.name, self.clocks.clock(other.name))


@dataclass(frozen=True)
class Work:
    """An NCCL collective in flight. It keeps what it works on until it was waited for, as PyTorch does."""

    group: "Group"
    mark: Mark
    tensors: list[Tensor]

    def wait(self) -> None:
        """The current stream waits; the host does not."""
        clocks = self.group.clocks
        if clocks.does(f"wait for {self.group.name}"):
            clocks.captures(self.mark, "")
            clocks.join(clocks.current, self.mark.clock)
        self.tensors.clear()


@dataclass(frozen=True)
class Group:
    """A process group of NCCL: it has a stream of its own, behind the one that is current at the call."""

    clocks: Clocks
    name: str
    inner: Any

    def run(self, call: str, reads: list[Tensor], writes: list[Tensor], *args: Any) -> Work:
        """A collective on the group's stream. Its data move at once: only the order is modelled."""
        stream, clocks = f"nccl {self.name}", self.clocks
        if clocks.does(f"event: {caller()}"):
            clocks.join(stream, clocks.clock(clocks.current))
        for tensor in reads:
            clocks.touch(tensor, False, f"{call} of {self.name}", stream)
        for tensor in writes:
            clocks.touch(tensor, True, f"{call} of {self.name}", stream)
        with clocks.paused():
            getattr(self.inner, call)(*args).wait()
        return Work(self, Mark(clocks, dict(clocks.clock(stream)), clocks.epoch), [*reads, *writes])

    def abort(self) -> None:
        """Nothing is in flight."""


@dataclass(frozen=True)
class ModelTransport:
    """A transport whose communicators are those of NCCL, on streams of the model."""

    inner: Any
    clocks: Clocks
    made: dict[Any, Any] = field(default_factory=dict)
    asynchronous: bool = True

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """The real NCCL communicator on a group of the model; control messages are as they are."""
        inner = self.inner.communicator(role, axes)
        if inner.size == 1 or role.startswith(("control", "checkpoint")):
            return Outside(inner, self.clocks)
        if (role, axes) not in self.made:
            name = f"{role}({'+'.join(axes)})"
            stream = ModelStream(self.clocks, f"side {name}")
            self.made[role, axes] = NcclCommunicator(name, inner.size, Group(self.clocks, name, inner), stream)
        return self.made[role, axes]

    def part(self, mesh: fs.Mesh) -> "ModelTransport":
        """The same around the transport of a part of the mesh."""
        return ModelTransport(self.inner.part(mesh), self.clocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Outside:
    """A communicator of the host, whose messages the model does not see; and copies of one rank, which it does."""

    inner: Any
    clocks: Clocks

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.inner.size)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if self.size == 1:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.clocks.paused():
                method(*args, **kwargs).wait()
            return _Over()

        return call


class _Over:
    """A handle of what is over."""

    def wait(self) -> None:
        """Does nothing."""


def _all_gather(out: Tensor, shard: Tensor, group: Any) -> Any:
    return group.run("all_gather", [shard], [out], out, shard)


def _reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Any:
    return group.run("reduce_scatter", [full], [out], out, full, full, False)  # played ranks need no staging


def staged(plan: fs.Plan, group: Any) -> int:
    """The staging that a plan on CUDA has."""
    return stage_numel(dataclasses.replace(plan, mesh=fs.abstract_mesh(*_axes(plan), device="cuda")), group)


def _axes(plan: fs.Plan) -> Any:
    return plan.mesh.sizes, plan.mesh.axis_names


def _all_gathers(outs: Any, shards: Any, group: Any) -> Any:
    return JointHandle(tuple([_all_gather(out, shard, group) for out, shard in zip(outs, shards, strict=True)]))


def _all_reduce(buffer: Tensor, group: Any) -> Any:
    return group.run("all_reduce", [], [buffer], buffer)


def _all_to_all(out: Tensor, full: Tensor, receive: Any, send: Any, group: Any) -> Any:
    return group.run("all_to_all", [full], [out], out, full, receive or None, send or None)


def substitute(change: Any) -> None:
    """Let ``NcclCommunicator`` call the ``run`` of its group in the place of torch.distributed."""
    change.setattr("fshard.runtime.comm.nccl.all_gather", _all_gather)
    change.setattr("fshard.runtime.comm.nccl.reduce_scatter", _reduce_scatter)
    change.setattr("fshard.runtime.comm.nccl.all_gathers", _all_gathers)
    change.setattr("fshard.runtime.comm.nccl.all_reduce", _all_reduce)
    change.setattr("fshard.runtime.comm.nccl.all_to_all", _all_to_all)


EVENTS = (
    "fshard.runtime.execution.actions",
    "fshard.runtime.execution.pending_update",
    "fshard.runtime.memory.offload",
    "fshard.runtime.memory.activation_copies",
    "fshard.checkpoint.save",
)
"""The modules that ask for an event after the work of a device."""

DEVICE_STREAMS = "fshard.runtime.comm.device_streams"
IN_USE = (DEVICE_STREAMS, "fshard.outer_steps.outer_exchange")
"""The modules that tell the allocator which stream uses memory."""

FREES = (
    *(f"fshard.runtime.execution.{module}" for module in ("actions", "replica_sums", "shards")),
    "fshard.runtime.memory.slots",
    "fshard.parts.replay",
)
"""The modules that free the memory of buffers."""

STREAMS = ("fshard.runtime.memory.offload", "fshard.checkpoint.save", "fshard.runtime.steps.programs")
"""The modules that make side streams."""


@contextmanager
def modelled(patch: Any, by_thread: dict[int, Clocks]) -> Iterator[None]:
    """Give the runtime the streams of the model: each rank's, by its thread."""

    def mine() -> Clocks:
        return by_thread[threading.get_ident()]

    def copies(device: Any, name: str) -> ModelStream:
        return ModelStream(mine(), f"copies {name}")

    with patch.context() as change:
        substitute(change)
        change.setattr("fshard.runtime.steps.programs.stage_numel", staged)
        for room in STREAMS:
            change.setattr(f"{room}.copy_stream", copies)
        for room in EVENTS:
            change.setattr(f"{room}.events", lambda device: tuple(filter(None, (mine().record(),))))
        change.setattr(f"{DEVICE_STREAMS}.ComputeOrder.kinds", ("cpu",))
        change.setattr(f"{DEVICE_STREAMS}.compute_stream", lambda device: ModelCompute(mine().current, mine()))
        for room in IN_USE:
            change.setattr(f"{room}.in_use", lambda tensor: mine().keep(tensor))
        for room in FREES:
            real = __import__(room, fromlist=["deallocate"]).deallocate
            change.setattr(f"{room}.deallocate", lambda tensor, real=real: (real(tensor), mine().resized(tensor))[0])
        yield
