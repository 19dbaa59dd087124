"""Communicators over NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.errors import CommError
from fshard.forks import keep, own
from fshard.runtime.comm.communicator import CLOSED, Events, Handle, Sizes
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.pending import PendingWork, all_gather, naming_errors, reduce_scatter
from fshard.runtime.comm.row_sums import sum_rows


@dataclass(eq=False)
class NcclCommunicator:
    """An NCCL communicator with its own stream. On hardware, only groups of one rank have run.

    ``wait`` does not block the host: it makes the compute stream wait. So a collective that a rank never comes to ends
    for the others only when they abort it, which ranks learn to do before they read their devices.

    Attributes:
        key: names the communicator in failure notes.
        closed: why it can no longer be used.
    """

    name: str
    size: int
    group: Any
    stream: Stream
    key: str = ""
    closed: str = ""

    def __post_init__(self) -> None:
        own(self)

    def disown(self, why: str) -> None:
        """Take no more collectives."""
        keep([self.close(why)])

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """NCCL all-gather on this communicator's stream."""
        with self._after(after, "all-gather") as (group, describe):
            return PendingWork(all_gather(out, shard, group), describe)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """NCCL reduce-scatter on this communicator's stream, into ``stage`` if it adds to ``out``.

        NCCL adds in the dtype of ``full``. If ``out`` has another one, ranks exchange rows and add them here.
        """
        if full.dtype != out.dtype:
            rows = stage[: full.numel()]
            with self._after(after, "reduce-scatter") as (group, describe):
                work = dist.all_to_all_single(rows, full, group=group, async_op=True)
                return PendingWork(work, describe, lambda: sum_rows(out, rows.view(self.size, -1), add))
        target = stage[: out.numel()] if add else out
        finish = (lambda: out.add_(target)) if add else None
        with self._after(after, "reduce-scatter") as (group, describe):
            return PendingWork(reduce_scatter(target, full, group), describe, finish)

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """NCCL all-reduce on this communicator's stream."""
        with self._after(after, "all-reduce") as (group, describe):
            return PendingWork(dist.all_reduce(buffer, group=group, async_op=True), describe)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """NCCL all-to-all on this communicator's stream."""
        with self._after(after, "all-to-all") as (group, describe):
            return PendingWork(dist.all_to_all_single(out, full, receive, send, group=group, async_op=True), describe)

    def close(self, reason: str = "") -> Any:
        """Take no more collectives. Returns the process group, which the caller aborts; None if that was done."""
        self.closed = self.closed or reason or CLOSED
        group, self.group = self.group, None
        return group

    @contextmanager
    def _after(self, after: Events, call: str) -> Iterator[tuple[Any, str]]:
        """Issue a collective on the group and the stream, after the events. Its errors name it.

        Another thread may close the communicator: the group is read once, and where it is None, torch.distributed would
        take the default group.
        """
        group, describe = self.group, f"{call} on {self.name}"
        if self.closed or group is None:
            raise CommError(f"{describe} failed: it is closed: {self.closed}")
        with naming_errors(describe), self.stream.after(after):
            yield group, describe
