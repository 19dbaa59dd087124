"""The actions of a schedule's ops on memory and communicators. One object for each engine, reset at every step."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.comm import Done, Handle
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.device_streams import Stream, events
from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.execution.pending_update import Update
from fshard.runtime.execution.replica_sums import ReplicaBuffers, Replicas
from fshard.runtime.execution.resident import Resident, Standing
from fshard.runtime.execution.shards import Shards
from fshard.runtime.execution.wires import gathered, rows_gathered, scattered, updated
from fshard.runtime.memory.gradients import FlatGradients, GradientBuffers
from fshard.runtime.memory.memory_spaces import allocate, deallocate
from fshard.runtime.memory.offload import CopyHandle
from fshard.runtime.memory.optimizer_layout import RESIDUAL
from fshard.runtime.memory.slots import GroupSlots, Slots, pack, unpack
from fshard.schedule.infos import secondary_axes
from fshard.schedule.ops import UPDATED, Op
from fshard.schedule.transfers import awaited, started
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes

NOTHING: Mapping[int, tuple[Tensor, float]] = MappingProxyType({})

Run = Callable[[], None]
"""An op that is bound to the memory that it works on."""

Verbs = Mapping[str, tuple[Callable[[Any], Handle], Callable[[Any], None]]]


class Actions:
    """Performs ops. Holds what a step has under way, and nothing that outlives it but memory.

    Every kind of transfer has a function that starts it and returns a handle, and may have one that makes the result
    readable when the handle was waited for. ``bind`` looks both up once, when a step is built.

    Args:
        slots: the groups' memory in the arena.
        comms: the communicators.
        gradients: what takes the gradients of leaves.
        resident: the shards.
        poison: fill freed ranges with nan, so that reading one cannot go unnoticed.
        aside: the stream of updates beside compute; None if they run in their place.
    """

    def __init__(
        self,
        slots: Slots,
        comms: Communicators,
        gradients: FlatGradients,
        resident: Resident,
        poison: bool,
        aside: Stream | None = None,
    ) -> None:
        self.slots, self.comms, self.gradients, self.resident, self.poison = slots, comms, gradients, resident, poison
        self.aside = aside
        self.replicas = Replicas(comms, resident.kernels)
        self.update: Update | None = None
        self.feedback: float | Tensor = 1.0
        self.handles: dict[tuple[str, int], Handle] = {}
        self.readable: set[int] = set()  # groups that units can read now
        self.sums: dict[int, Tensor] = {}  # those that are made in the staging, by group
        self.second: dict[int, Tensor] = {}  # secondary shards, by group
        self.standing = Standing(slots, resident)
        self.activations: HostedActivations | None = None  # what moves them to the host and back

    def beside(self, slots: Slots, comms: Communicators, gradients: FlatGradients) -> "Actions":
        """The actions of another program that reads the same shards in the same step: what is readable is shared."""
        made = Actions(slots, comms, gradients, self.resident, self.poison, self.aside)
        made.readable = self.readable
        return made

    def start(
        self,
        shards: Shards,
        update: Update | None,
        own: bool = False,
        accumulated: Mapping[int, tuple[Tensor, float]] = NOTHING,
        feedback: float | Tensor = 1.0,
    ) -> None:
        """Begin a step.

        Args:
            shards: the shards.
            update: the update that the step before left, or with ``own`` that of this step.
            own: whether the update is that of this step.
            accumulated: what is added to the gradients of the step, and times what, by group id.
            feedback: what residuals of shards are multiplied by when they are added to gradients.
        """
        self.update, self.feedback = update, feedback
        if update is not None:
            update.own = own
        self._clear()
        self.resident.follow()
        self.gradients.start(accumulated)
        self.resident.start(shards)
        self.standing.bind(shards, update is not None and not own)
        self.readable.update(self.standing.groups)

    def stop(self) -> None:
        """The step is over: let go of what it was given."""
        for name, group in [*self.handles]:  # the step has failed
            if name == "update":
                self._updated(group)
        self.update = None
        self.resident.start(())
        self._clear()  # something is left only if a collective has failed
        self.gradients.start(NOTHING)

    def _clear(self) -> None:
        self.handles.clear()
        self.readable.clear()
        self.sums.clear()
        self.second.clear()

    def bind(self, ops: Sequence[Op]) -> list[Run | None]:
        """Return what to call for each op; None for those that the executor performs itself."""
        by_name = {slots.group.name: slots for slots in self.slots.groups}
        verbs, moves = self._verbs(), {} if self.activations is None else self.activations.verbs()
        return [
            partial(moves[op.kind], (op.target, op.index))
            if op.kind in moves
            else self._bound(op, by_name[op.target], verbs)
            if op.target in by_name
            else None
            for op in ops
        ]

    def _bound(self, op: Op, slots: GroupSlots, verbs: Verbs) -> Run | None:
        row = started(op.kind) or awaited(op.kind)
        if row is None:
            if op.kind == UPDATED:
                return partial(self._updated, slots.group.id)
            releases = {"free": self._free, "reshard": self._reshard}
            return partial(releases[op.kind], slots) if op.kind in releases else None
        start, finish = verbs[row.name]
        given = self.gradients.buffers[slots.group.id] if row.stage == "gradient" else slots
        key = row.name, slots.group.id
        if row.name == op.kind:
            return partial(self._begin, key, start, given)
        return partial(self._end, key, finish, given)

    def _verbs(self) -> Verbs:
        """By kind of transfer, what starts it, and what makes its result readable once it has arrived."""
        return {
            "all_gather": (self._gather, self._gathered),
            "regather": (self._regather, self._regathered),
            "reduce_scatter": (self._reduce, self._reduced),
            "replica_reduce": (self._sum, self._summed),
            "offload": (self._offload, self._offloaded),
            "update_gather": (self._share, self._shared),
        }

    def _begin(self, key: tuple[str, int], start: Callable[[Any], Handle], buffers: object) -> None:
        self.handles[key] = start(buffers)

    def _end(self, key: tuple[str, int], finish: Callable[[Any], None], buffers: object) -> None:
        self.handles[key].wait()
        self.handles[key] = Done()  # where memory runs out below, that is done again, and this is not
        finish(buffers)
        del self.handles[key]

    def where(self, name: str) -> str:
        """The unit and the leaves of a group, as an error names them; empty if there is no such group."""
        for slots in self.slots.groups:
            if slots.group.name == name:
                paths = [leaf.path for leaf in slots.group.leaves]
                more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
                return f" (unit {slots.group.unit}: {', '.join(paths[:4])}{more})"
        return ""

    def apply(self, groups: Sequence[int], over: bool = True) -> None:
        """Update the shards of these groups, if a step left an update for them; without ``over`` on the side stream."""
        update = self.update
        if update is None:
            return
        if self.aside is not None and over:
            with self.aside.after(events(self.comms.plan.mesh.device)):
                try:
                    self.apply(groups, over=False)
                finally:
                    handle = CopyHandle(self.aside, (self.aside.record(),))
                    self.handles.update({("update", group): handle for group in groups})
            return
        for group in groups if update.own else ():
            self.gradients.ready(group)
        update.apply(groups, over)
        self.resident.fresh.difference_update(groups)
        for group in groups if self.resident.casts else ():
            layout = self.slots.groups[group].group
            if not layout.gathered and layout.opt_parts == 1:
                self.resident.read(layout)

    def _updated(self, group: int) -> None:
        """Wait for an update beside compute. Its gradient was made for the compute stream, and can go only now."""
        handle = self.handles.pop(("update", group), None)
        if handle is not None and self.update is not None:
            handle.wait()
            self.update.release((group,))

    def complete(self, update: Update) -> None:
        """Gather what other ranks updated, before a step that runs on demand. Collective."""
        groups = self.slots.groups
        handles = {group: self._sent(update, groups[group].group) for group in [*update.stale]}
        for group, handle in handles.items():
            handle.wait()
            update.received(group)

    def _gather(self, slots: GroupSlots) -> Handle:
        group = slots.group
        target = slots.stage if slots.stage is not None else slots.full
        assert target is not None
        if not group.numel:  # no communicator carries nothing
            return Done()
        form, full = group.wires.get("all_gather"), target
        shard = self.resident.read(group)
        if group.row:
            comm = self.comms.over("all_gather", group.gather_axes)
            return rows_gathered(comm, full, shard, group.numel)
        if form is not None:
            rows = group.parts * shard.numel()
            target = shard.new_empty(rows, device=full.device) if group.travels else shard
        after = None
        if group.kinds.hosted:
            shard, after = self.resident.offload.fetch(group, target, shard)
        if group.parts == 1:
            work = self.resident.offload.passing(after)
        else:
            work = self.comms.over("all_gather", group.gather_axes).all_gather(target, shard, after)
        return work if form is None else gathered(work, target, form, full, shard, self.resident.kernels)

    def _gathered(self, slots: GroupSlots) -> None:
        if slots.stage is not None:
            unpack(slots.group, slots.stage, slots.leaves)
        self.readable.add(slots.group.id)

    def _free(self, slots: GroupSlots) -> None:
        self.second.pop(slots.group.id, None)
        self._release(slots)

    def _release(self, slots: GroupSlots) -> None:
        self.readable.discard(slots.group.id)
        if self.poison and slots.full is not None:
            poison(slots.full)

    def _reshard(self, slots: GroupSlots) -> None:
        group, full = slots.group, slots.full
        assert full is not None
        if group.id not in self.second:  # its values stay until the next update
            mesh, fast = self.comms.plan.mesh, secondary_axes(group, self.comms.secondary)
            self.second[group.id] = full.view(mesh.axis_size(fast), -1)[mesh.index(fast)].clone()
        self._release(slots)

    def _regather(self, slots: GroupSlots) -> Handle:
        group, full = slots.group, slots.full
        assert full is not None
        comm = self.comms.over("regather", secondary_axes(group, self.comms.secondary))
        return comm.all_gather(full, self.second[group.id])

    def _regathered(self, slots: GroupSlots) -> None:
        self.readable.add(slots.group.id)

    def _reduce(self, buffers: GradientBuffers) -> Handle:
        group, grad = buffers.slots.group, self.gradients.take(buffers.slots)
        handle = self._scatter(buffers, grad, group.id in self.gradients.summed)
        self.gradients.summed.add(group.id)
        return handle

    def _scatter(self, buffers: GradientBuffers, grad: Tensor, add: bool) -> Handle:
        slots, shard = buffers.slots, buffers.shard
        group, late = slots.group, buffers.late and not add
        if not late:
            allocate(shard)
        if group.scatter_parts == 1 or not group.numel:
            shard.add_(grad) if add else shard.copy_(grad)
            return Done()
        comm, form = self.comms.over("reduce_scatter", group.scatter_axes), group.wires.get("reduce_scatter")
        sent, spare = grad, slots.reduce_stage
        assert spare is not None
        allocate(spare)
        if group.staged:
            sent, spare = spare[: group.numel], spare[group.numel :]
            pack(group, slots.grads, sent)
        if form is not None:
            handle = scattered(comm, sent, form, shard, add, self.resident.kernels)
            if not self.poison:  # what is packed is not read again
                slots.drop_grad()
                slots.drop_stage()
            return handle
        if late:
            shard = self.sums[group.id] = spare[: group.scatter_chunk]
        return comm.reduce_scatter(shard, sent, spare, add)

    def _reduced(self, buffers: GradientBuffers) -> None:
        slots, group = buffers.slots, buffers.slots.group
        if self.poison:
            poison(slots.claim_grad())
        else:
            slots.drop_grad()
        if group.id in self.sums:
            allocate(buffers.shard)
            buffers.shard.copy_(self.sums.pop(group.id))
        if not self.poison:
            slots.drop_stage()
        self._blank(group, buffers.shard, group.scatter_axes)

    def _summed(self, buffers: GradientBuffers) -> None:
        group = buffers.slots.group
        for part in (buffers.own, *(left for name, left in buffers.left.items() if name == RESIDUAL)):
            self._blank(group, part, group.owned.gather_axes)

    def _blank(self, group: Group, part: Tensor, axes: Axes) -> None:
        """Zero what no leaf covers of a rank's part of a gradient: rotated blocks have spread their rounding over it.

        The part is one of equal ones over some axes.
        """
        if any([form.rotate for form in group.wires.values()]):
            low = self.comms.plan.mesh.index(axes) * part.numel()
            for begin, end in group.gaps:
                part[max(begin - low, 0) : max(end - low, 0)].zero_()

    def _sum(self, buffers: GradientBuffers) -> Handle:
        group, left = buffers.slots.group, buffers.left
        for room in left.values():
            allocate(room)
        kept = ReplicaBuffers(self.resident.shards[group.id].opt, left, self.feedback) if left else None
        return self.replicas.sum(group, buffers.shard, buffers.own, kept)

    def _share(self, slots: GroupSlots) -> Handle:
        return self._sent(self.update, slots.group)

    def _sent(self, update: Update | None, group: Group) -> Handle:
        shard = update.sent(group.id) if update is not None else None
        if shard is None:
            return Done()
        comm, form = self.comms.over("update_gather", group.opt_axes), group.wires.get("update_gather")
        if form is not None:
            return updated(comm, shard.own, shard.param, shard.held, form)
        return comm.all_gather(shard.param, shard.own)

    def _shared(self, slots: GroupSlots) -> None:
        group = slots.group
        if self.update is not None:
            self.update.received(group.id)
            self.resident.fresh.discard(group.id)
            if not group.gathered:
                self.resident.read(group)

    def _offload(self, buffers: GradientBuffers) -> Handle:
        group = buffers.slots.group
        self.gradients.measure(group.id)
        return self.resident.offload.store(group, buffers.home, buffers.own)

    def _offloaded(self, buffers: GradientBuffers) -> None:
        deallocate(buffers.own)


def poison(buffer: Tensor) -> None:
    """Fill a range that nobody may read with nan (integers with their largest value)."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(math.nan)
    elif buffer.dtype is not torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
