"""The optimizer update that waits for the next forward to hide behind."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fshard.errors import half_updated
from fshard.optim.contract import Contract
from fshard.runtime.comm.device_streams import ComputeOrder, events
from fshard.runtime.engine.units import VERSION
from fshard.runtime.execution.rounding import Rounding
from fshard.runtime.execution.shards import Calls, Gradients, Shard, Shards, Slices
from fshard.runtime.memory.optimizer_layout import RESIDUAL, UpdateSlice
from fshard.sharding.plan import Plan


class NumbersInMemory(Protocol):
    """The numbers of an update in device memory, for a graph that is replayed with others."""

    @property
    def key(self) -> Tensor:
        """The key of its stochastic rounding, int64, 0-dim."""

    @property
    def unit(self) -> Tensor:
        """The factor of residuals that are kept, 0-dim."""

    @property
    def skip(self) -> Tensor:
        """The flag of a step that updates nothing, bool, 0-dim."""

    def of(self, limit: int, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the optimizer's update, for slices of a clipping rule whose gradients are of a dtype."""


@dataclass(eq=False)
class PendingUpdate:
    """The optimizer update of one step, as data: a state carries it until its groups are updated, here or in a step.

    Attributes:
        opt: the update rule.
        step: the number of the step, counted from 0.
        grads: the gradients.
        scale: what gradients are divided by, for each rule of clipping; None for 1.
        rounding: what updates those groups that are rounded stochastically; None if there are none.
        unit: what residuals are multiplied by, so that a state can keep them.
        device: whose streams work on it.
        waiting: the groups that are still to be updated, in order.
        broken: how the update rule failed, if it had written something by then.
    """

    opt: Contract
    step: int
    grads: Gradients
    scale: Sequence[float | None] = (None,)
    rounding: Rounding | None = None
    unit: float = 1.0
    device: torch.device = torch.device("cpu")
    waiting: dict[int, None] = field(init=False)
    broken: str = field(default="", init=False)
    divisors: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)
    order: ComputeOrder = field(default_factory=ComputeOrder, init=False, repr=False)

    def __post_init__(self) -> None:
        self.waiting = dict.fromkeys(self.grads.update_slices)
        if self.device.type in ComputeOrder.kinds:
            self.follow()

    def follow(self) -> None:
        """Let the current stream of the device work on it, after what worked on it before."""
        self.order.follow(self.device, self._tensors)

    def _tensors(self) -> list[Tensor]:
        held = [buffer for group in self.waiting for buffer in self.grads.buffers(group)]
        return [*held, *self.divisors.values()]

    def apply(
        self, shards: Shards, groups: Sequence[int], numbers: NumbersInMemory | None = None, over: bool = True
    ) -> None:
        """Update these groups, unless that was done: one call for all slices of equal hyper-parameters and dtype.

        If the rule raises before it has written anything, these groups still wait, and can be updated later. With
        ``numbers`` the rule reads these in the place of this update's own. Without ``over`` gradients stay, which
        another stream than that of their memory reads: ``release`` lets go of them.

        Raises:
            StateError: it had written something, now or before.
        """
        if self.broken:
            raise half_updated(self.broken)
        due = [group for group in groups if group in self.waiting]
        if due:
            shards.overwrite()
        staged, calls = self._calls(due, shards)
        written = [tensor for each in calls for tensor in each.written] + shards.tensors(staged)
        versions = list(map(VERSION, written))
        try:
            with torch.no_grad():
                for call in [call for each in calls for call in each.slices]:
                    self._call(call, numbers)
                for group in staged:
                    self._update_staged(group, shards[group])
                self._keep(due, shards, numbers)
        except BaseException as error:
            if versions != list(map(VERSION, written)):
                self.broken = f"{type(error).__name__}: {error}"
                raise half_updated(self.broken) from error
            raise
        for group in due:
            del self.waiting[group]
        if over:
            self.release(due)

    def _keep(self, groups: Sequence[int], shards: Shards, numbers: NumbersInMemory | None) -> None:
        """Keep what the sums of gradients of these groups, which this update applies, have left for the next ones."""
        unit = self.unit if numbers is None else numbers.unit
        for group in [group for group in groups if group in self.grads.left] if self.grads.left else ():
            for name, left in self.grads.left[group].items():
                kept = shards[group].opt[name]
                new = left * unit if name == RESIDUAL and (numbers is not None or unit != 1.0) else left
                kept.copy_(new if numbers is None else torch.where(numbers.skip, kept, new))

    def release(self, groups: Sequence[int]) -> None:
        """Let go of the gradients of groups that were updated."""
        for group in self.grads.passing.intersection(groups):
            self.grads.release(group)

    def finish(self, shards: Shards) -> None:
        """Update every group that was not updated yet. Local."""
        self.apply(shards, list(self.waiting))
        for device in {staging.space.device for staging in self.grads.stagings.values()}:
            for mark in events(device):
                mark.synchronize()  # whoever reads host memory next is not ordered behind the device

    @property
    def groups(self) -> set[int]:
        """All groups of this update."""
        return set(self.grads.update_slices)

    def refuse(self, why: str) -> None:
        """Mark the update as broken, unless it is."""
        self.broken = self.broken or why

    def detach(self) -> None:
        """Keep gradients that wait in memory of their own: the step that made them is about to write to theirs."""
        if self.waiting:
            self.follow()
            self.grads = self.grads.copied(self.waiting)

    def _calls(self, groups: Sequence[int], shards: Shards) -> tuple[Sequence[int], list[Calls]]:
        """Say which of these groups are kept elsewhere than they are updated, and what updates the others."""
        stagings, rounded = self.grads.stagings, () if self.rounding is None else self.rounding.groups
        if not stagings and not rounded:
            return (), [shards.calls(self.grads, tuple(groups))]
        parts = [[g for g in groups if g not in stagings and (g in rounded) is apart] for apart in (False, True)]
        return [g for g in groups if g in stagings], [shards.calls(self.grads, tuple(part)) for part in parts]

    def _call(self, call: Slices, numbers: NumbersInMemory | None = None) -> None:
        if self.rounding is not None and call.places[0][0] in self.rounding.groups:
            key = self.rounding.key(self.step) if numbers is None else numbers.key
            self.rounding.update(call, key, partial(self._rule, numbers=numbers))
        else:
            self._rule([*call.params], [*call.grads], [*call.states], call.cut, numbers)

    def _rule(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Tensor]],
        cut: UpdateSlice,
        numbers: NumbersInMemory | None = None,
    ) -> None:
        if numbers is not None:
            more = numbers.of(cut.limit, grads[0].dtype)
            self.opt.update(params, grads, states, step=self.step + 1, hyper=cut.hyper, **more)
            return
        more = {"late": cut.late} if cut.late else {}
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

    def _update_staged(self, group: int, home: Shard) -> None:
        staging = self.grads.stagings[group]
        staged = staging.stage_in(home.own, home.opt)
        for call in self.grads.alike({group: Shard(*staged, home.layouts)}):
            self._call(call)
        staging.stage_out(staged, home.own, home.opt)


@dataclass(eq=False)
class Several:
    """The updates of several parts of one state, which have no leaf in common, as one.

    Attributes:
        parts: the updates.
    """

    parts: tuple[PendingUpdate, ...]

    @property
    def waiting(self) -> dict[int, None]:
        """The groups that are still to be updated."""
        return {group: None for part in self.parts for group in part.waiting}

    @property
    def groups(self) -> set[int]:
        """All groups of these updates."""
        return {group for part in self.parts for group in part.groups}

    @property
    def broken(self) -> str:
        """Say how an update rule failed, if it had written something by then."""
        return next((part.broken for part in self.parts if part.broken), "")

    def follow(self) -> None:
        """See ``PendingUpdate.follow``."""
        for part in self.parts:
            part.follow()

    def refuse(self, why: str) -> None:
        """Mark all of them as broken."""
        for part in self.parts:
            part.refuse(why)

    def apply(
        self, shards: Shards, groups: Sequence[int], numbers: NumbersInMemory | None = None, over: bool = True
    ) -> None:
        """See ``PendingUpdate.apply``."""
        for part in self.parts:
            part.apply(shards, groups, numbers, over)

    def release(self, groups: Sequence[int]) -> None:
        """See ``PendingUpdate.release``."""
        for part in self.parts:
            part.release(groups)

    def finish(self, shards: Shards) -> None:
        """See ``PendingUpdate.finish``."""
        for part in self.parts:
            part.finish(shards)

    def detach(self) -> None:
        """See ``PendingUpdate.detach``."""
        for part in self.parts:
            part.detach()


def parts_of(pending: PendingUpdate | Several | None) -> tuple[PendingUpdate, ...]:
    """The updates of which an update consists."""
    if pending is None:
        return ()
    return pending.parts if isinstance(pending, Several) else (pending,)


def joined(pendings: Sequence[PendingUpdate]) -> PendingUpdate | Several | None:
    """Some updates of one state as one; None if there are none."""
    if len(pendings) < 2:
        return pendings[0] if pendings else None
    return Several(tuple(pendings))


def partly_updated(plan: Plan) -> dict[int, None]:
    """The groups of which each rank updates a part of its shard: after an update, the rest is on other ranks."""
    return {group.id: None for group in plan.groups if group.trainable and group.opt_parts > 1}


class Update:
    """A step's part in the update of a state, and the groups that lack the parts that other ranks update.

    Args:
        shards: the shards.
        pending: the update; None if it was applied.
        stale: the groups whose shards lack what other ranks updated; those that are whole again are taken out of it.
        numbers: those that its rule reads in the place of its own, in a graph.

    Attributes:
        own: whether it is that of the step under way.
    """

    def __init__(
        self,
        shards: Shards,
        pending: "PendingUpdate | Several | None",
        stale: dict[int, None],
        numbers: NumbersInMemory | None = None,
    ) -> None:
        self.shards, self.pending, self.stale, self.numbers = shards, pending, stale, numbers
        self.own = False
        self._stale_at_start = tuple(stale)
        self.stopped = False

    @property
    def begun(self) -> bool:
        """Tell whether a group was updated."""
        return self.pending is not None and len(self.pending.waiting) < len(self.pending.groups)

    def apply(self, groups: Sequence[int], over: bool = True) -> None:
        """Update these groups, unless that was done; see ``PendingUpdate.apply``."""
        if self.pending is not None:
            self.pending.apply(self.shards, () if self.stopped else groups, self.numbers, over)

    def release(self, groups: Sequence[int]) -> None:
        """See ``PendingUpdate.release``."""
        if self.pending is not None:
            self.pending.release([group for group in groups if group not in self.pending.waiting])

    def finish(self) -> None:
        """Update every group that was not updated yet. Local."""
        if self.pending is not None:
            self.pending.finish(self.shards)

    def made(self, left: tuple[Collection[int], Collection[int]] | None, why: str = "") -> None:
        """Note what a graph has done of the update.

        Args:
            left: the groups that still wait, and those that lack what other ranks have updated; None if nobody knows.
            why: the reason, where nobody knows.
        """
        waiting = self.pending.waiting if isinstance(self.pending, PendingUpdate) else {}
        if left is not None:
            for held, groups in zip((waiting, self.stale), left, strict=True):
                for group in [group for group in held if group not in groups]:
                    del held[group]
        elif waiting and self.pending is not None:
            self.pending.refuse(why)

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
            pending.refuse(f"group {group} was sent to other ranks before its update")
        return self.shards[group]

    def received(self, group: int) -> None:
        """The parts of other ranks are there."""
        self.stale.pop(group, None)
