"""A copy of a state in host memory, made beside the steps that follow."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.write import chunked
from fshard.runtime.comm.device_streams import Event, copy_stream, events
from fshard.torch_internals import foreach_copy_

ALIGN = 64
"""Bytes to which slices are aligned in a snapshot."""

CHUNK, CHUNKS = 32 << 20, 4
"""Bytes of a page-locked chunk, and their number: one is filled while others are emptied."""

Pair = tuple[Tensor, Tensor]
"""A target in host memory, and what is copied to it: bytes, 1-D."""


class Snapshot:
    """Host memory for a copy of this rank's slices, reused by every save: allocating new pages is slower than copying.

    What lies in host memory is copied at once. What lies on a GPU is copied by ``finish``, which two threads call: the
    one that writes, at once, and that of a step that is about to overwrite the state. One copies, the other waits.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.staging: Staging | None = None
        self.left: list[Pair] = []
        self.after: tuple[Event, ...] = ()
        self.lock = threading.Lock()

    def take(self, slices: Sequence[Slice]) -> list[Slice]:
        """Slices of the copy, which are valid until the next call, and complete after ``finish``."""
        starts, end = [], 0
        for s in slices:
            starts.append(end)
            end += -(-s.nbytes // ALIGN) * ALIGN
        if len(self.memory) < end:
            self.memory = self.memory.new_empty(0)  # free the old memory first
            self.memory = self.memory.new_empty(end)
        rows = [self.memory[a : a + s.nbytes] for a, s in zip(starts, slices, strict=True)]
        pairs = [(row, s.data.detach().view(torch.uint8)) for row, s in zip(rows, slices, strict=True)]
        for row, given in pairs:
            if given.device.type == "cpu":
                row.copy_(given)
        self.left = [pair for pair in pairs if pair[1].device.type != "cpu"]
        if self.left:
            device = self.left[0][1].device
            self.staging = self.staging or Staging(device)
            self.after = events(device)
        return [replace(s, data=row.view(s.data.dtype)) for s, row in zip(slices, rows, strict=True)]

    def finish(self) -> None:
        """Return when the copy is complete, and what was copied may be overwritten."""
        with self.lock:
            if self.left and self.staging is not None:
                self.staging.copy(self.left, self.after)
                self.left = []


class Staging:
    """A few chunks of page-locked memory, through which bytes of a device reach host memory of any size.

    Args:
        device: the device. Copies from it for checkpoints have a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, pinned = copy_stream(device, "snapshots"), device.type == "cuda"
        self.chunks = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(CHUNKS)]

    def copy(self, pairs: Sequence[Pair], after: Sequence[Event]) -> None:
        """Copy, beginning after the events. Returns when all has arrived."""
        flying: deque[Arriving] = deque()
        rows, given = chunked([row for row, _ in pairs], CHUNK), chunked([data for _, data in pairs], CHUNK)
        for to, of, chunk in zip(rows, given, cycle(self.chunks), strict=False):
            if len(flying) == CHUNKS:
                flying.popleft().land()
            flying.append(self._start(to, of, chunk, after))
        for one in flying:
            one.land()

    def _start(self, rows: list[Tensor], given: list[Tensor], chunk: Tensor, after: Sequence[Event]) -> "Arriving":
        parts = list(torch.split(chunk[: sum(map(len, rows))], [len(row) for row in rows]))
        with self.stream.after(after):
            foreach_copy_(parts, given, non_blocking=True)
            return Arriving(parts, rows, self.stream.record())


@dataclass(frozen=True)
class Arriving:
    """Bytes on their way to a chunk, and where they belong."""

    parts: list[Tensor]
    rows: list[Tensor]
    over: Event | None

    def land(self) -> None:
        """Wait until they are in the chunk, and copy them from there."""
        if self.over is not None:
            self.over.synchronize()
        foreach_copy_(self.rows, self.parts)
