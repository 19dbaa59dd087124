"""Copies between the memory of the host and of the device, beside the compute stream, while a step runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fshard.runtime.comm import Handle
from fshard.runtime.comm.streams import Event, Stream, make_stream
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh

Events = Sequence[Event | None]


class Offload:
    """Brings parameters from the host for their gathers, and gradients to it for their updates.

    One stream for each direction: a bus carries both at once. On a device that is the host's own, as in tests, all is
    the same but for the streams.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.inward, self.outward = make_stream(mesh.device), make_stream(mesh.device)
        self.fetched: dict[int, Event | None] = {}
        self.sent: dict[int, Event | None] = {}

    def fetch(self, group: Group, target: Tensor, shard: Tensor, after: Events) -> tuple[Tensor, Events]:
        """Bring a shard to where its gather puts it, so that it needs no room of its own on the device.

        Args:
            group: its group.
            target: what will be gathered, rank-major.
            shard: this rank's part, in host memory.
            after: what must be over before ``target`` is written.

        Returns:
            The part of ``target``, and what must be over before it is read.
        """
        part = self.mesh.index(group.gather_axes)
        own = target[part * group.chunk : (part + 1) * group.chunk]
        with self.inward.after(after):
            own.copy_(shard, non_blocking=True)
            self.fetched[group.id] = self.inward.record()
        return own, (self.fetched[group.id],)

    def store(self, group: Group, home: Tensor, grad: Tensor, after: Events) -> Handle:
        """Begin to send a gradient to the host. Its memory on the device can go when the handle was waited for."""
        with self.outward.after(after):
            home.copy_(grad, non_blocking=True)
            self.sent[group.id] = self.outward.record()
        return Passing(self.outward, (self.sent[group.id],))

    def passing(self, after: Events) -> Handle:
        """A handle that waits for events."""
        return Passing(self.inward, after)

    def settle(self, group: Group, written: Stream | None = None) -> None:
        """Block until the processor may write to what was fetched of a group, and read what was sent.

        With ``written``, a stream, also what was issued on the compute stream is over: it may have written to the host.
        """
        events = [self.fetched.get(group.id), self.sent.get(group.id), written.record() if written else None]
        for mark in events:
            if mark is not None:
                mark.synchronize()


@dataclass(frozen=True)
class Passing:
    """The handle of a copy: the compute stream waits for it, the host does not."""

    stream: Stream
    after: Events

    def wait(self) -> None:
        """Let what is issued from here on come after the copy."""
        self.stream.wait_for(self.after)
