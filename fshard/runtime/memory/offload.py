"""Copies between the memory of the host and of the device, beside the compute stream, while a step runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fshard.runtime.comm import Handle
from fshard.runtime.comm.device_streams import Event, Stream, copy_stream, events
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh

Events = Sequence[Event | None]


class Offload:
    """Copies parameters from the host for their gathers, and gradients to the host for their updates.

    Each direction has a stream, since a bus transfers both at once. If the device is the CPU, as in tests, all but the
    streams is the same.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.fetched: dict[int, Event | None] = {}
        self.sent: dict[int, Event | None] = {}

    @property
    def inward(self) -> Stream:
        """The stream of copies to the device. All steps have one."""
        return copy_stream(self.mesh.device, "from host memory")

    @property
    def outward(self) -> Stream:
        """The stream of copies to the host."""
        return copy_stream(self.mesh.device, "to host memory")

    def fetch(self, group: Group, target: Tensor, shard: Tensor, after: Events) -> tuple[Tensor, Events]:
        """Copy a shard to its place in the gathered buffer, so that it needs no further memory on the device.

        Args:
            group: its group.
            target: the buffer to be gathered, rank-major.
            shard: this rank's part, in host memory.
            after: events to wait for before ``target`` is written.

        Returns:
            The part of ``target``, and the events to wait for before it is read.
        """
        part = self.mesh.index(group.gather_axes)
        own = target[part * shard.numel() : (part + 1) * shard.numel()]
        with self.inward.after(after):
            own.copy_(shard, non_blocking=True)
            self.fetched[group.id] = self.inward.record()
        return own, (self.fetched[group.id],)

    def store(self, group: Group, home: Tensor, grad: Tensor, after: Events) -> Handle:
        """Start to copy a gradient to the host. Its memory on the device can be freed after waiting for the handle."""
        with self.outward.after(after):
            home.copy_(grad, non_blocking=True)
            self.sent[group.id] = self.outward.record()
        return CopyHandle(self.outward, (self.sent[group.id],))

    def passing(self, after: Events) -> Handle:
        """A handle that waits for events."""
        return CopyHandle(self.inward, after)

    def synchronize(self, group: Group, written: bool = False) -> None:
        """Block until the CPU may write a group's fetched parameters and read its sent gradients.

        With ``written`` also wait for the compute stream, which may have written to the host.
        """
        over = [self.fetched.get(group.id), self.sent.get(group.id), *(events(self.mesh.device) if written else ())]
        for event in over:
            if event is not None:
                event.synchronize()


@dataclass(frozen=True)
class CopyHandle:
    """The handle of a copy: the compute stream waits for it, the host does not."""

    stream: Stream
    after: Events

    def wait(self) -> None:
        """Make later work on the compute stream wait for the copy."""
        self.stream.wait_for(self.after)
