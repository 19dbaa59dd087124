"""The memory that a step keeps from one call to the next: the arena, gradients, and casts of shards."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.runtime.comm.device_streams import ComputeOrder
from fshard.runtime.memory.activation_copies import HostPool
from fshard.runtime.memory.memory_spaces import deallocate, memory_space
from fshard.runtime.memory.offload import Offload
from fshard.runtime.memory.optimizer_layout import left_by_sums
from fshard.schedule.ops import GroupInfo
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class GroupBuffers:
    """Places of the gradient of a trainable group on its path, 1-D. They may be one tensor.

    Attributes:
        shard: the gradient shard.
        own: what this rank updates of it, on the device.
        home: the same where the update reads it: on the device, or in host memory.
        late: whether the first sum of a shard is made in the staging.
        left: what its sum over replicas leaves for the next one, by the name of the buffer that keeps it.
    """

    shard: Tensor
    own: Tensor
    home: Tensor
    late: bool
    left: Mapping[str, Tensor]


class StepMemory:
    """The memory of a step. Nothing is allocated before the first program is prepared.

    Args:
        infos: what schedules know of the groups.
        train: whether there are gradients.
        poison: fill new memory with nan.
        fixed: keep the memory of gradients, so that they lie where a graph of the step has found them.

    Attributes:
        gradients: the buffers of trainable groups, by group id.
        homes: the ``home`` of each, which updates read.
        left: the ``left`` of those that have any, which updates keep.
        arena: the arena of programs that have a schedule; None before the first.
        order: the stream that has worked on all of this.
        casts: room for the shards of groups that units read in another dtype, or that travel packed, by group id.
        reduced: the groups whose gradients are reduced.
        passing: the groups whose gradients have memory on the device only from the backward to the update.
    """

    def __init__(self, plan: Plan, infos: Sequence[GroupInfo], train: bool, poison: bool, fixed: bool = False) -> None:
        self.plan, self.infos, self.poison, self.fixed = plan, infos, poison, fixed
        self.gradients: dict[int, GroupBuffers] = {}
        self.homes: dict[int, Tensor] = {}
        self.left: dict[int, Mapping[str, Tensor]] = {}
        self.casts: dict[int, Tensor] = {}
        self.arena: Tensor | None = None
        self.order = ComputeOrder()
        self.reduced = frozenset(number for number, info in enumerate(infos) if train and info.reduced)
        self.trained = [group for group in plan.groups if train and group.trainable]
        self.passing = frozenset([group.id for group in self.trained if not group.offloaded and not fixed])

    @functools.cached_property
    def offload(self) -> Offload:
        """Return what copies to and from host memory."""
        return Offload(self.plan.mesh)

    @functools.cached_property
    def host(self) -> HostPool:
        """Return the buffers on the host in which activations wait for their backward."""
        return HostPool(self.plan.mesh)

    def allocate(self) -> None:
        """Make the buffers of groups, at the first call."""
        for group in self.plan.groups:
            if group.resident_cast is not None and group.id not in self.casts:
                space = memory_space(group.kinds.param, self.plan.mesh)
                self.casts[group.id] = space.empty(*group.resident_cast)
        for group in self.trained:
            if group.id not in self.gradients:
                self.gradients[group.id] = made = self._gradient(group)
                self.homes[group.id] = made.home
                if made.left:
                    self.left[group.id] = made.left

    def follow(self) -> None:
        """Let the current stream of the device work on all of this, after what worked on it before."""
        self.order.follow(self.plan.mesh.device, self._tensors)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.casts.values()
        if self.arena is not None:
            yield self.arena
        for made in self.gradients.values():
            yield from (made.shard, made.own, *made.left.values())

    def _gradient(self, group: Group) -> GroupBuffers:
        device, chunk = self.plan.mesh.device, group.owned.chunk
        shard = own = home = torch.zeros(chunk, dtype=group.dtype, device=device)
        deallocate(own)
        if group.offloaded:
            pinned = "pinned_host" in (group.kinds.param, group.kinds.opt)
            space = memory_space("pinned_host" if pinned else "unpinned_host", self.plan.mesh)
            home = space.zeros(chunk, group.dtype)
        if group.second_scatter:
            shard = torch.zeros(group.chunk, dtype=group.dtype, device=device)
            deallocate(shard)
        late = any([transfer.late for transfer in self.infos[group.id].transfers])
        left = {name: torch.zeros(n, dtype=group.residual_dtype, device=device) for name, n in left_by_sums(group)}
        for buffer in left.values():
            deallocate(buffer)
        return GroupBuffers(shard, own, home, late, left)

    def new_arena(self, size: int) -> Tensor:
        """Memory for an arena of this many bytes."""
        arena = torch.empty(size, dtype=torch.uint8, device=self.plan.mesh.device)
        if self.poison:
            arena.fill_(255)  # every floating-point dtype reads all ones as nan
        return arena
