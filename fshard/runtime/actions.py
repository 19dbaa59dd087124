"""What the ops of a schedule do to memory and communicators. One object for each engine, reset at every step."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fshard.errors import CommError
from fshard.runtime.clock import Mark, make_clock
from fshard.runtime.comm import Done, Handle
from fshard.runtime.lanes import Lanes
from fshard.runtime.memory import allocate, deallocate
from fshard.runtime.norms import norms_of, share_of
from fshard.runtime.offload import Offload
from fshard.runtime.replicas import Replicas
from fshard.runtime.slots import GroupSlots, Slots, pack, unpack
from fshard.runtime.update import Shard, Update
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import Op
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan


class Actions:
    """Performs ops. Holds what a step has in flight, and nothing that outlives it but memory.

    Args:
        plan: the plan.
        slots: the groups' memory in the arena.
        lanes: the communicators.
        grads: the gradient of what this rank updates of each trainable group, by group id.
        parted: the gradient shard of each group of which it updates but a part.
        carried: what is added to gradients before their norms are taken, and times what, by group id; it changes from
            step to step.
        landed: the gradients of groups that are updated on the host, while they are on the device.
        casts: room for the shard of each group that units read in another dtype, by group id.
        offload: copies to and from host memory.
        poison: fill freed ranges with nan, so that reading one cannot go unnoticed.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Slots,
        lanes: Lanes,
        grads: Mapping[int, Tensor],
        parted: Mapping[int, Tensor],
        landed: Mapping[int, Tensor],
        casts: Mapping[int, Tensor],
        carried: Mapping[int, tuple[Tensor, float]],
        offload: Offload,
        poison: bool,
    ) -> None:
        self.plan, self.slots, self.lanes, self.grads, self.poison = plan, slots, lanes, grads, poison
        self.parted, self.landed, self.casts, self.carried, self.offload = parted, landed, casts, carried, offload
        self.summands = {**grads, **landed}  # what is summed over ranks, on the device
        self.cast: set[int] = set()
        self.by_name = {slots.group.name: slots for slots in slots.groups}
        self.clock = make_clock(plan.mesh.device)
        self.replicas = Replicas(lanes.sum, self.clock)
        self.verbs: dict[str, Callable[[GroupSlots, int], None]] = {
            "all_gather": self._gather,
            "wait all_gather": self._wait,
            "free": self._free,
            "reduce_scatter": self._reduce,
            "wait reduce_scatter": self._collect,
            "replica_reduce": self._sum,
            "wait replica_reduce": self._total,
            "update_gather": self._spread,
            "wait update_gather": self._join,
            "offload": self._offload,
            "wait offload": self._stored,
        }
        self.on_agree: Callable[[], None] = _nothing
        self.on_commit: Callable[[], None] = _nothing
        self.shards: list[Shard] = []
        self.update: Update | None = None
        self.own = False
        self.shares = {g.id: share_of(g, plan.mesh) for g in plan.groups if g.trainable}
        self.handles: dict[str, Handle] = {}
        self.readable: set[str] = set()
        self.touched: set[int] = set()
        self.summed: set[int] = set()
        self.landing = {
            number for number, info in enumerate(group_infos(plan)) if any([move.late for move in info.transfers])
        }
        self.sums: dict[int, Tensor] = {}  # those that are made in the staging, by group
        self.waiting: dict[int, tuple[Sequence[int], Sequence[Tensor | None]]] = {}  # gradients of leaves, by group
        self.norms: dict[int, Tensor] = {}  # of gradients, by group; those that an update uses up are taken before it

    def start(self, shards: list[Shard], update: Update | None, own: bool = False) -> None:
        """Begin a step on these shards, with the update that the step before left, or with this step's ``own``."""
        self.shards, self.update, self.own = shards, update, own
        self.handles.clear()
        self.readable.clear()
        self.touched.clear()
        self.summed.clear()
        self.sums.clear()
        self.cast.clear()
        self.norms.clear()
        self.waiting.clear()
        for slots in self.slots.groups:
            if not slots.group.gathered:
                waits = update is not None and not own and slots.group.trainable
                cast = self.casts.get(slots.group.id)
                slots.bind_resident(cast if waits and cast is not None else self._readable(slots.group.id))

    def stop(self) -> None:
        """The step is over: let go of what it was given."""
        self.shards, self.update = [], None
        self.handles.clear()  # something is left in it only if a collective has failed
        self.sums.clear()
        self.waiting.clear()
        self.on_agree = self.on_commit = _nothing

    def perform(self, op: Op) -> None:
        """Do one op that is neither a compute op nor an update."""
        if op.kind == "handshake":
            self.on_agree()
        elif op.kind == "consensus":
            self.on_commit()
        else:
            slots = self.by_name[op.target]
            try:
                self.verbs[op.kind](slots, op.microbatch)
            except CommError as error:
                raise CommError(f"{error} (unit {slots.group.unit}: {_leaves(slots.group)})") from error

    def live(self, group: str) -> bool:
        """Whether units can read this group now."""
        return group in self.readable or not self.by_name[group].group.gathered

    def sink(self, group: int, numbers: list[int], grads: list[Tensor | None]) -> None:
        """Put gradients of some leaves of a group into its flat gradient; what is missing is zero.

        The first ones of a group that is to be reduced wait for that, or for others to be added to, as they are: until
        then a reduction before theirs may end, which makes room.
        """
        slots = self.slots.groups[group]
        if group not in self.touched:
            self.touched.add(group)
            if slots.reduced:
                self.waiting[group] = numbers, grads
            else:
                _fill(slots, numbers, grads)
            return
        self._settle(slots)
        pairs = [(slots.grads[n], grad) for n, grad in zip(numbers, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])

    def claim(self, groups: Sequence[tuple[int, bool]]) -> bool:
        """Ask for the right to write flat gradients instead of adding to them.

        Args:
            groups: by id, and whether all leaves of it will be written. What will not be is zero on return.

        Returns:
            Whether none of them holds anything yet. If one does, nothing has happened.
        """
        if not self.touched.isdisjoint([group for group, _ in groups]):
            return False
        for group, whole in groups:
            slots = self.slots.groups[group]
            self.touched.add(group)
            grad = slots.claim_grad()
            if not whole:
                grad.zero_()
            elif slots.gaps and slots.grad is not self.grads[group]:
                torch._foreach_zero_(slots.gaps)
        return True

    def _settle(self, slots: GroupSlots) -> None:
        """Bring the gradients that wait into the flat gradient."""
        numbers, grads = self.waiting.pop(slots.group.id, ((), ()))
        if numbers:
            slots.claim_grad()
            _fill(slots, numbers, grads)

    def settle_gradients(self) -> None:
        """Make the gradients of resident groups that no unit touched zero, and add what earlier steps carried."""
        for slots in self.slots.groups:
            if slots.group.trainable and slots.group.id not in self.touched and slots.group.id not in self.summed:
                self.grads[slots.group.id].zero_()
        for group, (carried, factor) in self.carried.items():
            if group in self.landed:
                self.offload.settle(self.plan.groups[group])
                self.norms.pop(group, None)
            self.grads[group].add_(carried.to(self.grads[group].device), alpha=factor)

    def sumsq(self) -> float:
        """This rank's part of the squared norm of the summed gradients: each element counts once over all ranks."""
        held = [g for g in self.shares if g not in self.norms and self.grads[g].numel()]
        if held:
            self.norms.update(zip(held, norms_of([self.grads[g] for g in held]), strict=True))
        if not self.norms:
            return 0.0
        found = list(self.norms.values())
        if self.landed:  # what was carried in host memory has its norm there
            found = [norm.to(self.plan.mesh.device) for norm in found]
        norms = torch.stack(found).tolist()
        return math.fsum([self.shares[g] * norm * norm for g, norm in zip(self.norms, norms, strict=True)])

    def apply(self, groups: Sequence[str]) -> None:
        """Update the shards of these groups, if a step left an update for them."""
        if self.update is None:
            return
        ids = [self.by_name[name].group.id for name in groups]
        for group in ids if self.own else ():
            if group not in self.touched and group not in self.summed:
                self.grads[group].zero_()  # no unit of this step touched it
            if group in self.landed:
                self.offload.settle(self.plan.groups[group])  # its norm was taken before it left the device
            else:
                (self.norms[group],) = norms_of([self.grads[group]])
        self.update.apply(ids)
        self.cast.difference_update(ids)
        for group in ids:
            if not self.plan.groups[group].gathered and self.plan.groups[group].opt_parts == 1:
                self._readable(group)

    def _gather(self, slots: GroupSlots, microbatch: int) -> None:
        group = slots.group
        target = slots.stage if slots.stage is not None else slots.full
        assert target is not None
        if not group.numel:  # no lane carries nothing
            self.handles[f"gather {group.name}"] = Done()
            return
        shard, after = self._readable(group.id), self._now()
        if group.kinds.hosted:
            shard, after = self.offload.fetch(group, target, shard, after)
            if group.parts == 1:
                self.handles[f"gather {group.name}"] = self.offload.passing(after)
                return
        self.handles[f"gather {group.name}"] = self.lanes.gather[group.gather_axes].all_gather(target, shard, after)

    def _readable(self, group: int) -> Tensor:
        """This rank's shard in the dtype that units read, cast at most once an update."""
        param, cast = self.shards[group].param, self.casts.get(group)
        if cast is None:
            return param
        if group not in self.cast:
            if self.plan.groups[group].kinds.hosted:  # the cast of the step before, or the shard, may be on its way
                late = self.plan.groups[group].kinds.update == "device"
                self.offload.settle(self.plan.groups[group], self.clock if late else None)
            cast.copy_(param)
            self.cast.add(group)
        return cast

    def _wait(self, slots: GroupSlots, microbatch: int) -> None:
        group = slots.group
        self.handles.pop(f"gather {group.name}").wait()
        if slots.stage is not None:
            unpack(group, slots.stage, slots.leaves)
        self.readable.add(group.name)

    def _free(self, slots: GroupSlots, microbatch: int) -> None:
        self.readable.discard(slots.group.name)
        if self.poison and slots.full is not None:
            poison(slots.full)

    def _reduce(self, slots: GroupSlots, microbatch: int) -> None:
        group, grad = slots.group, slots.claim_grad()
        if group.id not in self.touched:
            grad.zero_()
        self._settle(slots)
        self.touched.discard(group.id)
        add, shard = group.id in self.summed, self.parted.get(group.id, self.summands[group.id])
        lands = group.id in self.landing and not add
        if not lands:
            allocate(shard)
        finish: Handle = Done()
        if group.scatter_parts == 1 or not group.numel:
            shard.add_(grad) if add else shard.copy_(grad)
        else:
            sent, spare = grad, slots.reduce_stage
            assert spare is not None
            allocate(spare)
            if group.staged:
                sent, spare = spare[: group.numel], spare[group.numel :]
                pack(group, slots.grads, sent)
            if lands:
                shard = self.sums[group.id] = spare[: group.scatter_chunk]
            finish = self.lanes.scatter[group.scatter_axes].reduce_scatter(shard, sent, spare, add, self._now())
        self.summed.add(group.id)
        self.handles[f"reduce {group.name}"] = finish

    def _collect(self, slots: GroupSlots, microbatch: int) -> None:
        group, key = slots.group.id, f"reduce {slots.group.name}"
        self.handles[key].wait()
        self.handles[key] = Done()  # where memory runs out below, that is done again, and this is not
        if self.poison:
            poison(slots.claim_grad())
        else:
            slots.drop_grad()
        if group in self.sums:
            shard = self.parted.get(group, self.summands[group])
            allocate(shard)
            shard.copy_(self.sums.pop(group))
        if not self.poison:
            slots.drop_stage()
        del self.handles[key]

    def _sum(self, slots: GroupSlots, microbatch: int) -> None:
        group, own = slots.group, self.summands[slots.group.id]
        self.handles[f"sum {group.name}"] = self.replicas.sum(group, self.parted.get(group.id, own), own)

    def _total(self, slots: GroupSlots, microbatch: int) -> None:
        self.handles.pop(f"sum {slots.group.name}").wait()

    def _spread(self, slots: GroupSlots, microbatch: int) -> None:
        if self.update is not None:
            self.update.spread(slots.group.id)

    def _join(self, slots: GroupSlots, microbatch: int) -> None:
        if self.update is not None:
            self.update.join(slots.group.id)
            self.cast.discard(slots.group.id)
            if not slots.group.gathered:
                self._readable(slots.group.id)

    def _offload(self, slots: GroupSlots, microbatch: int) -> None:
        group, grad = slots.group, self.landed[slots.group.id]
        (self.norms[group.id],) = norms_of([grad])
        self.handles[f"offload {group.name}"] = self.offload.store(group, self.grads[group.id], grad, self._now())

    def _stored(self, slots: GroupSlots, microbatch: int) -> None:
        self.handles.pop(f"offload {slots.group.name}").wait()
        deallocate(self.landed[slots.group.id])

    def _now(self) -> Sequence[Mark | None]:
        # Everything issued so far: later than the exact free of the range, never too early.
        return (self.clock.mark(),)


def poison(buffer: Tensor) -> None:
    """Fill a range that nobody may read with nan (integers with their largest value)."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(math.nan)
    elif buffer.dtype is not torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)


def _fill(slots: GroupSlots, numbers: Sequence[int], grads: Sequence[Tensor | None]) -> None:
    """Write the first gradients of a group. Leaves that have none get zeros."""
    if len(numbers) == len(slots.leaves) and all([grad is not None for grad in grads]):
        views = slots.grads if numbers == slots.numbers else [slots.grads[n] for n in numbers]
        torch._foreach_copy_(views, grads)  # type: ignore[arg-type]
        if slots.gaps:
            torch._foreach_zero_(slots.gaps)
        return
    assert slots.grad is not None
    slots.grad.zero_()
    pairs = [(slots.grads[n], grad) for n, grad in zip(numbers, grads, strict=True) if grad is not None]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])


def _leaves(group: Group) -> str:
    """The paths of a group's leaves, as an error names them."""
    paths = [leaf.path for leaf in group.leaves]
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _nothing() -> None:
    """No agreement, or no vote, is needed."""
