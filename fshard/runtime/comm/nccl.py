"""Communicators over NCCL."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.runtime.comm.communicator import Events, Handle, Sizes, sum_rows
from fshard.runtime.comm.pending import Pending, all_gather, reduce_scatter
from fshard.runtime.comm.streams import Stream


@dataclass(frozen=True)
class NcclCommunicator:
    """An NCCL communicator with its own stream. Not yet measured on hardware."""

    name: str
    size: int
    group: Any
    stream: Stream

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """NCCL all-gather on this communicator's stream."""
        with self.stream.after(after):
            return Pending(all_gather(out, shard, self.group), f"all-gather on {self.name}")

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """NCCL reduce-scatter on this communicator's stream, into ``stage`` if it adds to ``out``.

        NCCL adds in the dtype of ``full``. If ``out`` has another one, ranks exchange rows and add them here.
        """
        describe = f"reduce-scatter on {self.name}"
        if full.dtype != out.dtype:
            rows = stage[: full.numel()]
            with self.stream.after(after):
                work = dist.all_to_all_single(rows, full, group=self.group, async_op=True)
                return Pending(work, describe, lambda: sum_rows(out, rows.view(self.size, -1), add))
        target = stage[: out.numel()] if add else out
        finish = (lambda: out.add_(target)) if add else None
        with self.stream.after(after):
            return Pending(reduce_scatter(target, full, self.group), describe, finish)

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """NCCL all-reduce on this communicator's stream."""
        with self.stream.after(after):
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            return Pending(work, f"all-reduce on {self.name}")

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """NCCL all-to-all on this communicator's stream."""
        with self.stream.after(after):
            work = dist.all_to_all_single(out, full, receive, send, group=self.group, async_op=True)
            return Pending(work, f"all-to-all on {self.name}")
