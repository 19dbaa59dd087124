"""Resident shards, and the optimizer updates that wait for the next forward to hide behind."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import half_updated
from fshard.optim.contract import Contract
from fshard.runtime.clock import marks
from fshard.runtime.comm import Handle, Lane
from fshard.runtime.held import Held, Segment, segments, segments_of, start_buffers
from fshard.runtime.memory import deallocate
from fshard.runtime.places import Visit, place_of, same_memory
from fshard.runtime.rounding import Rounding
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh

__all__ = ["Gradients", "Segment", "Shard", "Update", "segments", "segments_of", "start_shard"]


class Shard:
    """What a rank keeps of one group: its chunk of the parameters, and the optimizer's buffers beside it, all 1-D.

    ``held`` says where the buffers keep what belongs to a leaf. ``own`` are the elements of ``param`` that this rank
    updates, where others that hold the same chunk update the rest.
    """

    def __init__(
        self,
        param: Tensor,
        opt: dict[str, Tensor],
        held: Mapping[str, Held] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.param = param
        self.opt = opt
        self.held = held or {}
        self.part = part
        self.own = param if part is None else param[part[0] : part[1]]
        self._cut: tuple[tuple[Segment, ...], list[tuple[Tensor, dict[str, Tensor]]]] = ((), [])

    def slices(self, segments: tuple[Segment, ...]) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """The views that an optimizer updates, one pair a segment; made once, they are as old as the shard."""
        if self._cut[0] is not segments:
            views = [(self.own[cut.begin : cut.end], self._states(cut)) for cut in segments]
            self._cut = (segments, views)
        return self._cut[1]

    def _states(self, cut: Segment) -> dict[str, Tensor]:
        parts = {name: held.part(cut) for name, held in self.held.items()}
        return {name: self.opt[name][part[0] : part[1]] for name, part in parts.items() if part is not None}

    def clone(self) -> "Shard":
        """A shard of its own memory with the same values."""
        opt = {name: same_memory(value) for name, value in self.opt.items()}
        return Shard(same_memory(self.param), opt, self.held, self.part)


def start_shard(group: Group, mesh: Mesh, opt: Contract, param: Tensor) -> Shard:
    """A shard before its first update. A frozen group has no optimizer state."""
    if not group.trainable:
        return Shard(param, {})
    part = group.own_range(mesh) if group.opt_parts > 1 else None
    own = param if part is None else param[part[0] : part[1]]
    buffers, held = start_buffers(group.owned, mesh, opt, own)
    if group.kinds.hosted or group.kinds.opt != "device":
        place = place_of(group.kinds.opt, mesh)
        buffers = {name: place.keep(value) for name, value in buffers.items()}
    return Shard(param, buffers, held, part)


@dataclass(frozen=True)
class Gradients:
    """The reduced gradients of a train step.

    Attributes:
        shards: a chunk a trainable group, by group id; made when the first step runs.
        cuts: the segments of each trainable group.
        passing: the groups whose chunks have memory from their reduction to their update alone.
        senders: the communicators over which groups are made whole of which each rank updates a part, by group id.
        visits: how groups that are not kept where they are updated come there, by group id.
        host: the groups that are updated on the host.
        views: those asked for so far.
    """

    shards: Mapping[int, Tensor]
    cuts: Mapping[int, tuple[Segment, ...]]
    passing: frozenset[int]
    senders: Mapping[int, Lane] = field(default_factory=dict)
    visits: Mapping[int, Visit] = field(default_factory=dict)
    host: frozenset[int] = frozenset()
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def drop(self) -> None:
        """Let go of gradients that nobody will apply."""
        for group in self.passing:
            deallocate(self.shards[group])

    def slices(self, group: int) -> list[Tensor]:
        """The views of one group's gradients, one a segment."""
        if group not in self.views:
            self.views[group] = [self.shards[group][cut.begin : cut.end] for cut in self.cuts[group]]
        return self.views[group]


class Slices(NamedTuple):
    """What one call updates.

    Attributes:
        cut: the first of their segments: what it says beside its range holds for all.
        params: the parameters.
        grads: their gradients.
        states: the optimizer's state of each.
    """

    cut: Segment
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]


class Update:
    """The optimizer update of one step, applied group by group when the schedule says so.

    Args:
        opt: the update rule.
        number: the step's number, counted from 0.
        shards: the shards to update, by group id.
        grads: their gradients.
        scale: what gradients are divided by, for each rule of clipping; None for 1.
        rounding: what updates those groups that are rounded stochastically; None if there are none.
        before: the update of the step before. What it made of the same shards serves again.

    Attributes:
        broken: how the update rule failed, if it had written something by then.
    """

    def __init__(
        self,
        opt: Contract,
        number: int,
        shards: list[Shard],
        grads: Gradients,
        scale: Sequence[float | None] = (None,),
        rounding: Rounding | None = None,
        before: "Update | None" = None,
    ) -> None:
        self.broken = ""
        self.rounding = rounding
        self.opt, self.number, self.shards, self.grads, self.scale = opt, number, shards, grads, scale
        self.calls: dict[tuple[int, ...], tuple[list[Slices], list[Tensor]]] = {}
        if before is not None and before.shards is shards and before.grads is grads:
            self.calls = before.calls
        self.divisors: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}
        self.waiting = dict.fromkeys(grads.cuts)
        self.unsent = dict.fromkeys(grads.senders)
        self.coming: dict[int, Handle] = {}
        self.stopped = False

    @property
    def begun(self) -> bool:
        """Whether a group was updated."""
        return len(self.waiting) < len(self.grads.cuts)

    def apply(self, groups: Sequence[int]) -> None:
        """Update these groups, unless that was done: one call for all slices of equal hyper-parameters and dtype.

        If the rule raises before it has written anything, these groups still wait, and can be updated later.

        Raises:
            StateError: it had written something, now or before.
        """
        if self.broken:
            raise half_updated(self.broken)
        due = [group for group in groups if group in self.waiting and not self.stopped]
        rounded = self.rounding.groups if self.rounding is not None else frozenset()
        some = bool(rounded or self.grads.visits)
        apart = [group for group in due if group in rounded or group in self.grads.visits] if some else []
        calls, written = self._calls(tuple([group for group in due if group not in apart]))
        written = written + [x for n in apart for x in (self.shards[n].param, *self.shards[n].opt.values())]
        versions = [tensor._version for tensor in written]
        try:
            with torch.no_grad():
                for cut, params, grads, states in calls:
                    self._rule([*params], [*grads], [*states], cut)
                for group in apart:
                    self._apart(group, self.shards[group], group in rounded)
        except BaseException as error:
            if versions != [tensor._version for tensor in written]:
                self.broken = f"{type(error).__name__}: {error}"
                raise half_updated(self.broken) from error
            raise
        for group in due:
            del self.waiting[group]
            if group in self.grads.passing:
                deallocate(self.grads.shards[group])

    def _rule(self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], cut: Segment) -> None:
        more: dict[str, Any] = {"late": cut.late} if cut.late else {}
        scale, step = self._divisor(cut.limit, grads[0]), self.number + 1
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

    def _apart(self, group: int, home: Shard, rounded: bool) -> None:
        """Update a group that is rounded, or of which something is kept on the other side."""
        visit = self.grads.visits.get(group)
        guests = visit.bring(home.own, home.opt) if visit is not None else (home.own, home.opt)
        shard = Shard(*guests, home.held) if visit is not None else home
        if rounded:
            self._rounded(group, shard)
        else:
            for cut, params, grads, states in self._alike({group: shard}):
                self._rule(params, grads, states, cut)
        if visit is not None:
            visit.leave(guests, home.own, home.opt)

    def _rounded(self, group: int, shard: Shard) -> None:
        assert self.rounding is not None
        cuts = self.grads.cuts[group]
        slices, grads = shard.slices(cuts), self.grads.slices(group)
        self.rounding.update(group, cuts, slices, grads, self.number, self._rule)

    def _calls(self, due: tuple[int, ...]) -> tuple[list[Slices], list[Tensor]]:
        """The calls that update these groups, and what they write."""
        if due not in self.calls:
            calls = self._alike({group: self.shards[group] for group in due})
            self.calls[due] = calls, [x for call in calls for x in (*call.params, *_values(call.states))]
        return self.calls[due]

    def _alike(self, shards: Mapping[int, Shard]) -> list[Slices]:
        """The slices of some groups, those together that agree in what rules ask for, and lie on one side."""
        alike: dict[tuple[Hashable, ...], Slices] = {}
        for group, shard in shards.items():
            cuts, views, host = self.grads.cuts[group], self.grads.slices(group), group in self.grads.host
            for (param, state), grad, cut in zip(shard.slices(cuts), views, cuts, strict=True):
                key = (cut.hyper, cut.limit, cut.late, param.dtype, host)
                call = alike.setdefault(key, Slices(cut, [], [], []))
                call.params.append(param)
                call.grads.append(grad)
                call.states.append(state)
        return list(alike.values())

    def stop(self) -> None:
        """Update nothing more. What was updated is still sent: other ranks wait for it."""
        self.stopped = True

    def resume(self) -> None:
        """Take back ``stop``, where nothing was updated on any rank: all of it is still to be done."""
        self.stopped, self.unsent = False, dict.fromkeys(self.grads.senders)

    def spread(self, group: int) -> None:
        """Send what this rank has updated of a group to those that hold the same shard."""
        if group in self.unsent:
            if group in self.waiting and not self.stopped:
                # The rule has failed here, and others cannot be kept waiting: what they get is not what they expect.
                self.broken = self.broken or f"group {group} was sent to other ranks before its update"
            shard = self.shards[group]
            self.coming[group] = self.grads.senders[group].all_gather(shard.param, shard.own, marks(shard.param.device))
            del self.unsent[group]

    def join(self, group: int) -> None:
        """Wait for what they have updated."""
        if group in self.coming:
            self.coming.pop(group).wait()

    def finish(self) -> None:
        """Update every group that was not updated yet. Collective where ranks update parts of what they share."""
        self.apply(list(self.waiting))
        for group in list(self.unsent):
            self.spread(group)
        for group in list(self.coming):
            self.join(group)
        for device in {visit.place.device for visit in self.grads.visits.values()}:
            for mark in marks(device):
                mark.synchronize()  # whoever reads host memory next is not ordered behind the device


def _values(states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]
