"""What a rank keeps of each group, and the optimizer update that waits for the next forward to hide behind."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import half_updated
from fshard.optim.contract import Contract
from fshard.runtime.comm.streams import events
from fshard.runtime.execution.rounding import Rounding
from fshard.runtime.memory.allocation import deallocate
from fshard.runtime.memory.memory_spaces import UpdateStaging, memory_space, same_memory, update_stagings
from fshard.runtime.memory.optimizer_layout import BufferLayout, UpdateSlice, start_buffers
from fshard.runtime.memory.step_memory import StepMemory
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

Slice = tuple[Tensor, dict[str, Tensor]]
"""Views of a range of a shard: of the parameters, and of the optimizer's buffers by name."""


class Shard:
    """What a rank keeps of one group: its chunk of the parameters, and the optimizer's buffers beside it, all 1-D.

    ``layouts`` says where the buffers keep what belongs to a leaf. ``own`` are the elements of ``param`` that this rank
    updates; they are fewer where ``part`` says so, and then other ranks that hold the same chunk update the rest.
    """

    def __init__(
        self,
        param: Tensor,
        opt: dict[str, Tensor],
        layouts: Mapping[str, BufferLayout] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.param, self.opt, self.layouts, self.part = param, opt, layouts or {}, part
        self.own = param if part is None else param[part[0] : part[1]]
        self._cut: tuple[tuple[UpdateSlice, ...], list[Slice]] = ((), [])

    def __reduce__(self) -> tuple[Any, ...]:
        """A shard is pickled without its views."""
        return Shard, (self.param, self.opt, self.layouts, self.part)

    def slices(self, update_slices: tuple[UpdateSlice, ...]) -> list[Slice]:
        """The views that an optimizer updates, one pair an update slice; cached for the lifetime of the shard."""
        if self._cut[0] is not update_slices:
            self._cut = (update_slices, [(self.own[cut.begin : cut.end], self._states(cut)) for cut in update_slices])
        return self._cut[1]

    def _states(self, cut: UpdateSlice) -> dict[str, Tensor]:
        parts = {name: layout.part(cut) for name, layout in self.layouts.items()}
        return {name: self.opt[name][part[0] : part[1]] for name, part in parts.items() if part is not None}

    def clone(self) -> "Shard":
        """A shard of its own memory with the same values."""
        opt = {name: same_memory(value) for name, value in self.opt.items()}
        return Shard(same_memory(self.param), opt, self.layouts, self.part)


def start_shard(group: Group, mesh: Mesh, opt: Contract, param: Tensor) -> Shard:
    """A shard before its first update. A frozen group has no optimizer state."""
    if not group.trainable:
        return Shard(param, {})
    part = group.own_range(mesh) if group.opt_parts > 1 else None
    own = param if part is None else param[part[0] : part[1]]
    buffers, layouts = start_buffers(group.owned, mesh, opt, own)
    if group.kinds.hosted or group.kinds.opt != "device":
        place = memory_space(group.kinds.opt, mesh)
        buffers = {name: place.keep(value) for name, value in buffers.items()}
    return Shard(param, buffers, layouts, part)


class Shards(list[Shard]):
    """The shards of all groups, by group id, which a donated state hands on to the next one.

    Attributes:
        layout: where each one keeps the optimizer's buffers.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        super().__init__(shards)
        self.layouts = tuple([shard.layouts for shard in self])
        self._calls: tuple[Gradients | None, dict[tuple[int, ...], Calls]] = (None, {})

    def calls(self, grads: "Gradients", due: tuple[int, ...]) -> "Calls":
        """The calls of the optimizer that update some groups, cached while gradients lie where they do."""
        if self._calls[0] is not grads:
            self._calls = (grads, {})
        made = self._calls[1]
        if due not in made:
            made[due] = Calls(grads.alike({group: self[group] for group in due}))
        return made[due]

    def tensors(self, groups: Iterable[int]) -> list[Tensor]:
        """The parameters of some groups, and the optimizer's state of them."""
        return [tensor for group in groups for tensor in (self[group].param, *self[group].opt.values())]

    def clone(self) -> "Shards":
        """Shards of their own memory with the same values."""
        return Shards(shard.clone() for shard in self)


class Slices(NamedTuple):
    """What one call of the optimizer updates.

    Attributes:
        cut: the first of their update slices: what it says beside its range holds for all.
        params: the parameters.
        grads: their gradients.
        states: the optimizer's state of each.
    """

    cut: UpdateSlice
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]


class Calls:
    """The calls of the optimizer that update some groups, and all tensors that they write."""

    def __init__(self, slices: list[Slices]) -> None:
        self.slices = slices
        self.written = [x for call in slices for x in (*call.params, *(t for s in call.states for t in s.values()))]


@dataclass(frozen=True)
class Gradients:
    """The reduced gradients of a train step.

    Attributes:
        shards: a chunk a trainable group, by group id; made when the first step runs.
        update_slices: what one kernel call can update of each trainable group.
        passing: the groups whose chunks have memory from their reduction to their update alone.
        stagings: how groups that are not kept where they are updated come there, by group id.
        host: the groups that are updated on the host.
        views: those asked for so far.
    """

    shards: Mapping[int, Tensor]
    update_slices: Mapping[int, tuple[UpdateSlice, ...]]
    passing: frozenset[int]
    stagings: Mapping[int, UpdateStaging] = field(default_factory=dict)
    host: frozenset[int] = frozenset()
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def drop(self) -> None:
        """Let go of gradients that will not be applied."""
        for group in self.passing:
            deallocate(self.shards[group])

    def copied(self, groups: Iterable[int]) -> "Gradients":
        """The gradients of some groups in memory of their own."""
        return replace(self, shards={group: same_memory(self.shards[group]) for group in groups}, views={})

    def slices(self, group: int) -> list[Tensor]:
        """The views of one group's gradients, one an update slice."""
        if group not in self.views:
            self.views[group] = [self.shards[group][cut.begin : cut.end] for cut in self.update_slices[group]]
        return self.views[group]

    def alike(self, shards: Mapping[int, Shard]) -> list[Slices]:
        """The slices of some shards, those together that agree in what optimizers ask for, and lie on one side."""
        alike: dict[tuple[Hashable, ...], Slices] = {}
        for group, shard in shards.items():
            cuts, host = self.update_slices[group], group in self.host
            for (param, state), grad, cut in zip(shard.slices(cuts), self.slices(group), cuts, strict=True):
                key = (cut.hyper, cut.limit, cut.late, param.dtype, host)
                call = alike.setdefault(key, Slices(cut, [], [], []))
                call.params.append(param)
                call.grads.append(grad)
                call.states.append(state)
        return list(alike.values())


def gradients_of(plan: Plan, memory: StepMemory, slices: Mapping[int, tuple[UpdateSlice, ...]]) -> Gradients:
    """What becomes of the gradients of a step.

    Args:
        plan: the plan.
        memory: where they lie.
        slices: the update slices of each trainable group.
    """
    host = frozenset(group.id for group in plan.groups if group.offloaded)
    return Gradients(memory.homes, slices, memory.reduced - host, update_stagings(plan), host)


@dataclass(eq=False)
class Pending:
    """The optimizer update of one step, as data: a state carries it until its groups are updated, here or in a step.

    Attributes:
        opt: the update rule.
        step: the number of the step, counted from 0.
        grads: the gradients.
        scale: what gradients are divided by, for each rule of clipping; None for 1.
        rounding: what updates those groups that are rounded stochastically; None if there are none.
        waiting: the groups that are still to be updated, in order.
        broken: how the update rule failed, if it had written something by then.
    """

    opt: Contract
    step: int
    grads: Gradients
    scale: Sequence[float | None] = (None,)
    rounding: Rounding | None = None
    waiting: dict[int, None] = field(init=False)
    broken: str = field(default="", init=False)
    divisors: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.waiting = dict.fromkeys(self.grads.update_slices)

    def apply(self, shards: Shards, groups: Sequence[int]) -> None:
        """Update these groups, unless that was done: one call for all slices of equal hyper-parameters and dtype.

        If the rule raises before it has written anything, these groups still wait, and can be updated later.

        Raises:
            StateError: it had written something, now or before.
        """
        if self.broken:
            raise half_updated(self.broken)
        due = [group for group in groups if group in self.waiting]
        apart = self._apart(due)
        calls = shards.calls(self.grads, tuple([group for group in due if group not in apart] if apart else due))
        written = [*calls.written, *shards.tensors(apart)] if apart else calls.written
        versions = [tensor._version for tensor in written]
        try:
            with torch.no_grad():
                for cut, params, grads, states in calls.slices:
                    self._rule([*params], [*grads], [*states], cut)
                for group in apart:
                    self._update_apart(group, shards[group])
        except BaseException as error:
            if versions != [tensor._version for tensor in written]:
                self.broken = f"{type(error).__name__}: {error}"
                raise half_updated(self.broken) from error
            raise
        self._done(due)

    def _done(self, groups: Sequence[int]) -> None:
        for group in groups:
            del self.waiting[group]
            if group in self.grads.passing:
                deallocate(self.grads.shards[group])

    def finish(self, shards: Shards) -> None:
        """Update every group that was not updated yet. Local."""
        self.apply(shards, list(self.waiting))
        for device in {staging.space.device for staging in self.grads.stagings.values()}:
            for mark in events(device):
                mark.synchronize()  # whoever reads host memory next is not ordered behind the device

    def detach(self) -> None:
        """Keep gradients that wait in memory of their own: the step that made them is about to write to theirs."""
        if self.waiting:
            self.grads = self.grads.copied(self.waiting)

    def _apart(self, groups: Sequence[int]) -> list[int]:
        """Which of these groups are updated one at a time: rounded, or kept elsewhere than they are updated."""
        rounded = self.rounding.groups if self.rounding is not None else ()
        stagings = self.grads.stagings
        return [group for group in groups if group in rounded or group in stagings] if rounded or stagings else []

    def _rule(
        self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], cut: UpdateSlice
    ) -> None:
        more: dict[str, Any] = {"late": cut.late} if cut.late else {}
        scale, step = self._divisor(cut.limit, grads[0]), self.step + 1
        self.opt.update(params, grads, states, step=step, hyper=cut.hyper, grad_scale=scale, found_inf=None, **more)

    def _divisor(self, limit: int, grad: Tensor) -> Tensor | None:
        factor = self.scale[limit]
        if factor is None:
            return None
        dtype = torch.promote_types(grad.dtype, torch.float32)
        key = (limit, grad.device, dtype)
        if key not in self.divisors:
            self.divisors[key] = torch.full((), factor, dtype=dtype, device=grad.device)
        return self.divisors[key]

    def _update_apart(self, group: int, home: Shard) -> None:
        staging, update_slices = self.grads.stagings.get(group), self.grads.update_slices[group]
        staged = staging.stage_in(home.own, home.opt) if staging is not None else (home.own, home.opt)
        shard = Shard(*staged, home.layouts) if staging is not None else home
        if self.rounding is not None and group in self.rounding.groups:
            slices = shard.slices(update_slices)
            self.rounding.update(group, update_slices, slices, self.grads.slices(group), self.step, self._rule)
        else:
            for cut, params, grads, states in self.grads.alike({group: shard}):
                self._rule(params, grads, states, cut)
        if staging is not None:
            staging.stage_out(staged, home.own, home.opt)


def partly_updated(plan: Plan) -> dict[int, None]:
    """The groups of which each rank updates a part of its shard: after an update, the rest is on other ranks."""
    return {group.id: None for group in plan.groups if group.trainable and group.opt_parts > 1}


class Update:
    """What one step does with the update of a state, and which groups lack the parts that other ranks update.

    Args:
        shards: the shards.
        pending: the update; None if it was applied.
        stale: the groups whose shards lack what other ranks updated; those that are whole again are taken out of it.
    """

    def __init__(self, shards: Shards, pending: Pending | None, stale: dict[int, None]) -> None:
        self.shards, self.pending, self.stale = shards, pending, stale
        self._stale_at_start = tuple(stale)
        self.stopped = False

    @property
    def begun(self) -> bool:
        """Whether a group was updated."""
        return self.pending is not None and len(self.pending.waiting) < len(self.pending.grads.update_slices)

    def apply(self, groups: Sequence[int]) -> None:
        """Update these groups, unless that was done; see ``Pending.apply``."""
        if self.pending is not None:
            self.pending.apply(self.shards, () if self.stopped else groups)

    def finish(self) -> None:
        """Update every group that was not updated yet. Local."""
        if self.pending is not None:
            self.pending.finish(self.shards)

    def stop(self) -> None:
        """Update nothing more. What was updated is still sent: other ranks wait for it."""
        self.stopped = True

    def resume(self) -> None:
        """Take back ``stop``, where nothing was updated on any rank: all of it is still to be done."""
        self.stopped = False
        self.stale.update(dict.fromkeys(self._stale_at_start))

    def sent(self, group: int) -> Shard | None:
        """The shard of a group of which other ranks wait for this rank's part; None if they have it."""
        if group not in self.stale:
            return None
        pending = self.pending
        if pending is not None and group in pending.waiting and not self.stopped:
            # The rule has failed here, and others cannot be kept waiting: what they get is not what they expect.
            pending.broken = pending.broken or f"group {group} was sent to other ranks before its update"
        return self.shards[group]

    def received(self, group: int) -> None:
        """The parts of other ranks are there."""
        self.stale.pop(group, None)
