"""Gradients while a step runs: from the gradients of leaves to flat gradients, and their norms."""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fshard.runtime.memory.offload import Offload
from fshard.runtime.memory.slots import GroupSlots
from fshard.runtime.memory.step_memory import GroupBuffers
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.torch_internals import foreach_add_, foreach_copy_, foreach_norm, foreach_zero_

SHORT = frozenset((torch.float16, torch.bfloat16))
DTYPE = operator.attrgetter("dtype")


def norms_of(shards: list[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor, in float32 at least: one kernel for all, or two where some are short.

    In a 16-bit dtype a norm would lose digits, or overflow although no element does.
    """
    if SHORT.isdisjoint(map(DTYPE, shards)):
        return foreach_norm(shards)
    if SHORT.issuperset(map(DTYPE, shards)):
        return foreach_norm(shards, 2, torch.float32)
    narrow = iter(norms_of([shard for shard in shards if shard.dtype in SHORT]))
    wide = iter(norms_of([shard for shard in shards if shard.dtype not in SHORT]))
    return [next(narrow if shard.dtype in SHORT else wide) for shard in shards]


def share_of(group: Group, mesh: Mesh) -> float:
    """The factor for sums over a group's elements on this rank, so that over all ranks each element counts once."""
    return mesh.axis_size(group.owned.gather_axes + group.leaves[0].compute.axes) / mesh.size / group.holders


@dataclass(frozen=True)
class GradientBuffers(GroupBuffers):
    """The buffers of the gradient of a trainable group, along its path.

    Attributes:
        slots: the group's memory in the arena, with the flat gradient and its staging.
    """

    slots: GroupSlots

    @property
    def offloaded(self) -> bool:
        """Tell whether the update reads it in host memory."""
        return self.home is not self.own


@dataclass
class FlatGradients:
    """Collects the gradients of leaves, and tracks which groups have any, and their norms.

    Attributes:
        buffers: those of trainable groups, by group id.
        offload: copies to and from host memory.
        accumulated: gradients of earlier steps and their factors, by group id: added before norms are taken.
        touched: the groups whose flat gradient has values.
        summed: the groups whose shard has values.
        waiting: numbers and gradients of leaves that are not yet in the flat gradient, by group id.
        norms: of shards, by group id. Those of gradients that an update overwrites are taken before it.
    """

    plan: Plan
    buffers: Mapping[int, GradientBuffers]
    offload: Offload
    accumulated: Mapping[int, tuple[Tensor, float]] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[Sequence[int], Sequence[Tensor | None]]] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares = {g.id: share_of(g, self.plan.mesh) for g in self.plan.groups if g.trainable}

    def start(self, accumulated: Mapping[int, tuple[Tensor, float]]) -> None:
        """Begin a step, or end one: discard all gradients."""
        self.accumulated = accumulated
        for held in (self.touched, self.summed, self.waiting, self.norms):
            held.clear()

    def full(self, group: int) -> dict[int, Tensor] | None:
        """The full gradients of a group's leaves on this rank, by their numbers in it; None where there are none."""
        if group in self.waiting:
            return {n: grad for n, grad in zip(*self.waiting[group], strict=True) if grad is not None}
        return dict(enumerate(self.buffers[group].slots.grads)) if group in self.touched else None

    def sink(self, group: int, numbers: list[int], grads: list[Tensor | None]) -> None:
        """Add gradients of some leaves of a group to its flat gradient. Missing gradients are zero.

        The first gradients of a group with a reduction stay outside of the flat gradient until it begins, or until
        others are added: an earlier reduction may end before, which frees memory.
        """
        slots = self.buffers[group].slots
        if group not in self.touched:
            self.touched.add(group)
            if slots.reduced:
                self.waiting[group] = numbers, grads
            else:
                _fill(slots, numbers, grads)
            return
        self.flatten(slots)
        pairs = [(slots.grads[n], grad) for n, grad in zip(numbers, grads, strict=True) if grad is not None]
        if pairs:
            foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])

    def claim(self, groups: Sequence[tuple[int, bool]]) -> bool:
        """Ask to write flat gradients directly in place of adding to them.

        Args:
            groups: group ids, and whether all leaves of the group will be written; other leaves are zero on return.

        Returns:
            Whether none of the groups has gradients yet. If one has, nothing is changed.
        """
        if not self.touched.isdisjoint([group for group, _ in groups]):
            return False
        for group, whole in groups:
            buffers = self.buffers[group]
            self.touched.add(group)
            grad = buffers.slots.claim_grad()
            if not whole:
                grad.zero_()
            elif buffers.slots.gaps:
                foreach_zero_(buffers.slots.gaps)
        return True

    def flatten(self, slots: GroupSlots) -> None:
        """Move waiting gradients into the flat gradient."""
        numbers, grads = self.waiting.pop(slots.group.id, ((), ()))
        if numbers:
            _fill(slots, numbers, grads)

    def take(self, slots: GroupSlots) -> Tensor:
        """The complete flat gradient: zero where no unit has one. The group's next gradient starts from zero."""
        grad = slots.claim_grad()
        if slots.group.id not in self.touched:
            grad.zero_()
        self.flatten(slots)
        self.touched.discard(slots.group.id)
        return grad

    def fill(self) -> None:
        """After a backward: what no unit has touched is zero, also where a batch before has left something.

        Gradients with a reduction become zero when it begins.
        """
        for group, buffers in self.buffers.items():
            if not buffers.slots.reduced and group not in self.touched:
                self._fill(group)

    def _fill(self, group: int) -> None:
        self.buffers[group].slots.claim_grad().zero_()
        self.touched.add(group)

    def complete(self) -> None:
        """At the end of a train step: fill gradients, and add what earlier steps accumulated."""
        self.fill()
        for group, (accumulated, factor) in self.accumulated.items():
            buffers = self.buffers[group]
            if buffers.offloaded:
                self.offload.synchronize(buffers.slots.group)
                self.norms.pop(group, None)
            buffers.home.add_(accumulated.to(buffers.home.device), alpha=factor)

    def arrive(self) -> None:
        """Wait until gradients that are updated on the host are there."""
        for buffers in self.buffers.values():
            if buffers.offloaded:
                self.offload.synchronize(buffers.slots.group)

    def ready(self, group: int) -> None:
        """Before an update with a gradient of this step: complete the gradient, and take its norm."""
        if group not in self.touched and group not in self.summed:
            self._fill(group)
        buffers = self.buffers[group]
        if buffers.offloaded:
            self.offload.synchronize(buffers.slots.group)  # its norm was taken before it left the device
        else:
            (self.norms[group],) = norms_of([buffers.home])

    def measure(self, group: int) -> None:
        """Take the norm of a gradient before its offload."""
        (self.norms[group],) = norms_of([self.buffers[group].own])

    def all_norms(self) -> dict[int, Tensor]:
        """The norm of this rank's part of the gradient of each group, 0-dim, by group id."""
        due = {group: home for group, home in self._homes.items() if group not in self.norms}
        if due:
            self.norms.update(zip(due, norms_of([*due.values()]), strict=True))
        return self.norms

    @functools.cached_property
    def _homes(self) -> dict[int, Tensor]:
        """The gradients that this rank updates any of, by group id."""
        return {group: each.home for group, each in self.buffers.items() if each.home.numel()}


def _fill(slots: GroupSlots, numbers: Sequence[int], grads: Sequence[Tensor | None]) -> None:
    """Write the first gradients of a group. Leaves that have none get zeros."""
    flat = slots.claim_grad()
    if len(numbers) == len(slots.leaves) and type(None) not in map(type, grads):
        views = slots.grads if numbers == slots.numbers else [slots.grads[n] for n in numbers]
        foreach_copy_(views, grads)  # type: ignore[arg-type]
        if slots.gaps:
            foreach_zero_(slots.gaps)
        return
    flat.zero_()
    pairs = [(slots.grads[n], grad) for n, grad in zip(numbers, grads, strict=True) if grad is not None]
    if pairs:
        foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
