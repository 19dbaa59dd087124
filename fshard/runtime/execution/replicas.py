"""Sums of gradient shards over replicas: once a step, on communicators of their own, beside everything else.

What is summed is this rank's shard of the gradient, after it was reduced over the ranks that hold the other shards: the
second of the two stages that HSDP has (Zhao et al., PyTorch FSDP, 2023; MiCS, Zhang et al., 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.runtime.comm import Done, Handle
from fshard.runtime.comm.communicator import sum_rows
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.packing import Kernels, no_kernels
from fshard.runtime.comm.streams import events
from fshard.runtime.execution.wires import Residual, scattered, summed
from fshard.runtime.memory.allocation import allocate, deallocate
from fshard.schedule.infos import rows_travel
from fshard.sharding.layout import Group


@dataclass(frozen=True)
class Replicas:
    """Sums shards over replicas.

    Args:
        comms: the communicators.
        kernels: compiled ones that pack.
    """

    comms: Communicators
    kernels: Kernels = no_kernels

    def sum(self, group: Group, shard: Tensor, own: Tensor, residual: Residual | None = None) -> Handle:
        """Begin to complete a gradient. ``own`` holds what this rank updates when the handle was waited for.

        Args:
            group: the group.
            shard: this rank's shard of the gradient, which holds all microbatches.
            own: the shard itself; or, where its ranks update a part of it each, room for this rank's part. The memory
                of ``shard`` goes when that is complete.
            residual: what rounding leaves out, where that is kept. Then a shard is not scattered again.
        """
        if not group.second_scatter:
            return self._all(group, own, residual)
        allocate(own)
        form, comm = group.wires.get("replica_reduce"), self.comms.over("replica_reduce", group.opt_axes)
        if form is not None:
            first = scattered(comm, shard, form, own, False, self.kernels)
            deallocate(shard)
            return Scattered(first, own, shard, lambda: self._all(group, own))
        sent = shard if group.sum_dtype == shard.dtype else shard.to(group.sum_dtype)
        room = sent.numel() - (own.numel() if sent is shard else 0)
        stage = torch.empty(room, dtype=sent.dtype, device=sent.device)
        first = comm.reduce_scatter(own, sent, stage, False, events(sent.device))
        return Scattered(first, sent, shard, lambda: self._all(group, own))

    def _all(self, group: Group, own: Tensor, residual: Residual | None = None) -> Handle:
        """Begin to add up over the replicas of what a rank updates.

        Where that sends no more than an all-reduce, all rows travel to all replicas: what is rounded to travel is
        rounded once, everything is in one message, and each replica adds up in the order of ranks, so that all of
        them come to the same bits.
        """
        comm = self.comms.over("replica_reduce", group.rest_axes)
        if comm.size == 1:
            if residual is not None:  # of a run with more replicas: nothing is rounded here but to the gradient's dtype
                residual.after.sub_(own.copy_(residual.added(own)))
            return Done()
        form = group.wires.get("replica_reduce")
        if form is not None:
            return summed(comm, own, form, self.kernels, residual)
        if not rows_travel(group, comm.size):
            return comm.all_reduce(own, events(own.device))
        mine = own if group.sum_dtype == own.dtype else own.to(group.sum_dtype)
        rows = torch.empty(comm.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        # An event from now: what is sent may just have been rounded.
        return Rows(comm.all_gather(rows, mine, events(mine.device)), rows, mine, own)


@dataclass(frozen=True)
class Scattered:
    """The handle of a shard that is scattered again, and then summed over the replicas of its parts."""

    work: Handle
    sent: Tensor
    shard: Tensor
    rest: Callable[[], Handle]

    def wait(self) -> None:
        """Wait for this rank's part, let go of the whole, and sum the part."""
        self.work.wait()
        deallocate(self.shard)
        self.rest().wait()


@dataclass(frozen=True)
class Rows:
    """The handle of a sum of which all rows come to all replicas. ``sent`` is kept until it is over."""

    work: Handle
    rows: Tensor
    sent: Tensor
    own: Tensor

    def wait(self) -> None:
        """Wait for the rows, then add them up."""
        self.work.wait()
        sum_rows(self.own, self.rows.view(-1, self.own.numel()), False)
