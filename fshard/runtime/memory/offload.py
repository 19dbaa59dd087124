"""Copies between the memory of the host and of the device, beside the compute stream, while a step runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fshard.runtime.comm import Done, Handle
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

    def fetch(self, group: Group, target: Tensor, shard: Tensor) -> tuple[Tensor, Events]:
        """Copy a shard to its place in the gathered buffer, so that it needs no further memory on the device.

        The copy comes after all that the current stream was given so far, whoever has read the buffer.

        Args:
            group: its group.
            target: the buffer to be gathered, rank-major.
            shard: this rank's part, in host memory.

        Returns:
            The part of ``target``, and the events to wait for before it is read.
        """
        part = self.mesh.index(group.gather_axes)
        own = target[part * shard.numel() : (part + 1) * shard.numel()]
        with self.inward.after(events(self.mesh.device)):
            own.copy_(shard, non_blocking=True)
            self.fetched[group.id] = self.inward.record(self.fetched.get(group.id))
        return own, (self.fetched[group.id],)

    def store(self, group: Group, home: Tensor, grad: Tensor) -> Handle:
        """Start to copy a gradient to the host. Its memory on the device can be freed after waiting for the handle."""
        with self.outward.after(events(self.mesh.device)):
            home.copy_(grad, non_blocking=True)
            self.sent[group.id] = self.outward.record(self.sent.get(group.id))
        return CopyHandle(self.outward, (self.sent[group.id],))

    def passing(self, after: Events | None) -> Handle:
        """A handle that waits for events."""
        return Done() if after is None else CopyHandle(self.inward, after)

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
