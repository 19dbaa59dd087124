"""Copies of activations to the memory of the host and back, and the buffers there that they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fshard.runtime.comm import Handle
from fshard.runtime.comm.device_streams import Event, events
from fshard.runtime.memory.memory_spaces import memory_space
from fshard.runtime.memory.offload import CopyHandle, Offload
from fshard.sharding.kinds import MemoryKind
from fshard.sharding.mesh import Mesh


class Copied(NamedTuple):
    """Tensors that are being copied, and what to wait for before they are read."""

    tensors: Sequence[Tensor]
    handle: Handle


class Copies(Protocol):
    """Copies the bytes of calls to the host and back. All tensors are 1-D, of ``torch.uint8``."""

    def leave(self, call: tuple[str, int], sources: Sequence[Tensor]) -> Copied:
        """Start to copy what a call keeps to the host; the sources must stay until the handle was waited for."""

    def come(self, call: tuple[str, int], kept: Sequence[Tensor]) -> Copied:
        """Start to copy it back, to new memory; what is kept must stay until the handle was waited for."""

    def drop(self, kept: Sequence[Tensor]) -> None:
        """Note that nobody reads these on the host again."""


@dataclass
class HostPool:
    """Buffers in page-locked memory of the host, that are used again for what has the same size.

    It never holds more than has been in use at once: where a new buffer would exceed that, free ones go first.

    Attributes:
        mesh: the mesh of the device.
        free: the buffers that are not in use, by bytes.
        used: bytes in use.
        idle: bytes that are not in use.
        most: the most bytes in use.
    """

    mesh: Mesh
    free: dict[int, list[Tensor]] = field(default_factory=dict)
    used: int = 0
    idle: int = 0
    most: int = 0

    def take(self, size: int) -> Tensor:
        """A buffer of so many bytes, of undefined values."""
        self.used += size
        self.most = max(self.most, self.used)
        if found := self.free.get(size):
            self.idle -= size
            return found.pop()
        while self.used + self.idle > self.most:
            largest = max(size for size, buffers in self.free.items() if buffers)
            self.free[largest].pop()
            self.idle -= largest
        kind: MemoryKind = "pinned_host" if self.mesh.device.type == "cuda" else "unpinned_host"
        return memory_space(kind, self.mesh).empty(size, torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """A buffer is not in use any more."""
        self.used -= buffer.nbytes
        self.idle += buffer.nbytes
        self.free.setdefault(buffer.nbytes, []).append(buffer)


@dataclass
class ActivationCopies:
    """Copies of activations on the streams of copies to the host and back.

    A buffer of the pool is written after all that the compute stream has been given, which has waited for whoever read
    it last. What comes back is made on the compute stream, so that the memory is free of what was there before.

    Attributes:
        over: the event after the latest copies of each call to the host (True), and back.
    """

    offload: Offload
    pool: HostPool
    over: dict[tuple[bool, tuple[str, int]], Event | None] = field(default_factory=dict)

    def leave(self, call: tuple[str, int], sources: Sequence[Tensor]) -> Copied:
        """Start to copy to the host."""
        kept, outward = [self.pool.take(source.nbytes) for source in sources], self.offload.outward
        with outward.after(events(self.pool.mesh.device)):
            for buffer, source in zip(kept, sources, strict=True):
                buffer.copy_(source, non_blocking=True)
            self.over[True, call] = over = outward.record(self.over.get((True, call)))
        return Copied(kept, CopyHandle(outward, (over,)))

    def come(self, call: tuple[str, int], kept: Sequence[Tensor]) -> Copied:
        """Start to copy to the device."""
        device, inward = self.pool.mesh.device, self.offload.inward
        targets = [torch.empty(buffer.numel(), dtype=torch.uint8, device=device) for buffer in kept]
        with inward.after(events(device)):
            for target, buffer in zip(targets, kept, strict=True):
                target.copy_(buffer, non_blocking=True)
            self.over[False, call] = over = inward.record(self.over.get((False, call)))
        return Copied(targets, CopyHandle(inward, (over,)))

    def drop(self, kept: Sequence[Tensor]) -> None:
        """Let others use these buffers."""
        for buffer in kept:
            self.pool.give(buffer)
