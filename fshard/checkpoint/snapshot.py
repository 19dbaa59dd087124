"""A copy of what a rank writes, for a thread to write while the next steps run."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fshard.checkpoint.write import Slice

ALIGN = 64


class Snapshot:
    """Host memory for one copy of this rank's slices, kept from save to save: fresh pages cost more than the copy.

    From a GPU it is page-locked, and copies run in the order of the compute stream: the step that follows waits for
    nothing, and the thread that writes waits for them.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.event: torch.cuda.Event | None = None

    def take(self, slices: Sequence[Slice]) -> list[Slice]:
        """Copy these slices; valid until the next call. On a GPU they are there after ``wait``."""
        starts, end = [], 0
        for s in slices:
            starts.append(end)
            end += -(-s.nbytes // ALIGN) * ALIGN
        cuda = any(s.data.is_cuda for s in slices)
        if self.memory is None or len(self.memory) < end or self.memory.is_pinned() < cuda:
            self.memory = None  # the old one goes first
            self.memory = torch.empty(end, dtype=torch.uint8, pin_memory=cuda)
        rows = [self.memory[a : a + s.nbytes].view(s.data.dtype) for a, s in zip(starts, slices, strict=True)]
        if rows:
            torch._foreach_copy_(rows, [s.data for s in slices], non_blocking=cuda)
        if cuda:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        return [replace(s, data=row) for s, row in zip(slices, rows, strict=True)]

    def wait(self) -> None:
        """Wait until the copy is there."""
        if self.event is not None:
            self.event.synchronize()
