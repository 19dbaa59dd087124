"""Sums of gradient shards over replicas: once a step, on communicators of their own, beside everything else.

What is summed is this rank's shard of the gradient, after it was reduced over the ranks that hold the other shards: the
second of the two stages that HSDP has (Zhao et al., PyTorch FSDP, 2023; MiCS, Zhang et al., 2022).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor

from fshard.runtime.comm import Done, Handle
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.packing import Kernels, no_kernels
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.execution.power_sgd import Basis, Product, low_rank_sum
from fshard.runtime.execution.wires import Continued, Residual, scattered, summed
from fshard.runtime.memory.memory_spaces import allocate, deallocate
from fshard.runtime.memory.optimizer_layout import BASIS, RESIDUAL
from fshard.schedule.infos import rows_travel
from fshard.sharding.layout import Group
from fshard.sharding.low_rank import Matrix, matrices, rank_of


@dataclass(frozen=True)
class ReplicaBuffers:
    """Buffers that sums over replicas leave for the next ones, by the name of the buffer.

    Attributes:
        before: what those before have left. It stays as it is.
        after: room for what this one leaves.
        factor: times what the residual is added.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    factor: float | Tensor

    @property
    def residual(self) -> Residual:
        """Return what is left out of sums."""
        return Residual(self.before[RESIDUAL], self.factor, self.after[RESIDUAL])

    def alone(self, own: Tensor) -> None:
        """Add what more replicas have left to the part of one alone, which leaves what its dtype cannot hold."""
        residual = self.residual
        residual.after.sub_(own.copy_(residual.added(own)))
        if BASIS in self.after:
            self.after[BASIS].copy_(self.before[BASIS])


@dataclass(frozen=True)
class Replicas:
    """Sums shards over replicas.

    Args:
        comms: the communicators.
        kernels: compiled ones that pack.
        found: the matrices that travel as products, by group id.
        under_way: sums of such products that are still held. At most one has not sent its second factors.
    """

    comms: Communicators
    kernels: Kernels = no_kernels
    found: dict[int, Sequence[Matrix]] = field(default_factory=dict)
    under_way: WeakSet[Product] = field(default_factory=WeakSet)

    def sum(self, group: Group, shard: Tensor, own: Tensor, kept: ReplicaBuffers | None = None) -> Handle:
        """Begin to complete a gradient. ``own`` holds what this rank updates when the handle was waited for.

        Args:
            group: the group.
            shard: this rank's shard of the gradient, which holds all microbatches.
            own: the shard itself; or, where its ranks update a part of it each, room for this rank's part. The memory
                of ``shard`` goes when that is complete.
            kept: what sums leave for the next ones, where that is kept. Then a shard is not scattered again.
        """
        if not group.second_scatter:
            return self._all(group, own, kept)
        allocate(own)
        form, comm = group.wires.get("replica_reduce"), self.comms.over("replica_reduce", group.opt_axes)

        def rest() -> None:
            deallocate(shard)
            self._all(group, own).wait()

        if form is not None:
            first = scattered(comm, shard, form, own, False, self.kernels)
            deallocate(shard)
            return Continued(first, rest, (own,))
        sent = shard if group.sum_dtype == shard.dtype else shard.to(group.sum_dtype)
        room = sent.numel() - (own.numel() if sent is shard else 0)
        stage = torch.empty(room, dtype=sent.dtype, device=sent.device)
        first = comm.reduce_scatter(own, sent, stage, False)
        return Continued(first, rest, (sent,))

    def _all(self, group: Group, own: Tensor, kept: ReplicaBuffers | None = None) -> Handle:
        """Begin to add up over the replicas of what a rank updates.

        Where that sends no more than an all-reduce, all rows travel to all replicas: what is rounded to travel is
        rounded once, everything is in one message, and each replica adds up in the order of ranks, so that all of
        them come to the same bits.
        """
        comm = self.comms.over("replica_reduce", group.rest_axes)
        if comm.size == 1:
            if kept is not None:
                kept.alone(own)
            return Done()
        if kept is not None and BASIS in kept.after:
            basis = Basis(kept.before[BASIS], kept.after[BASIS], self._matrices(group), rank_of(group))
            # Its second factors leave when the next sum begins, and travel while others compute.
            for earlier in self.under_way:
                earlier.advance()
            found = low_rank_sum(own, kept.residual, basis, lambda part: self._exact(group, part, part.dtype))
            self.under_way.add(found)
            return found
        form = group.wires.get("replica_reduce")
        if form is not None:
            return summed(comm, own, form, self.kernels, None if kept is None else kept.residual)
        return self._exact(group, own, group.sum_dtype)

    def _matrices(self, group: Group) -> Sequence[Matrix]:
        """The matrices in this rank's shard of a group."""
        if group.id not in self.found:
            part = self.comms.plan.mesh.index(group.owned.gather_axes)
            self.found[group.id] = [*matrices(group.owned, part, rank_of(group))]
        return self.found[group.id]

    def _exact(self, group: Group, own: Tensor, dtype: torch.dtype) -> Handle:
        """Begin to add up a tensor over the replicas of a group, in place; in this dtype, where rows travel."""
        comm = self.comms.over("replica_reduce", group.rest_axes)
        if not rows_travel(group, comm.size):
            return comm.all_reduce(own)
        mine = own if dtype == own.dtype else own.to(dtype)
        rows = torch.empty(comm.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        work = comm.all_gather(rows, mine)
        return Continued(work, lambda: sum_rows(own, rows.view(-1, own.numel()), False), (rows, mine))
