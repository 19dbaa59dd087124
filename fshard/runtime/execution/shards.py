"""Shards: a rank's part of each group, and the gradients that update it, as optimizers take them."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.model.philox import fold, uniform
from fshard.optim.contract import Contract
from fshard.runtime.comm.device_streams import ComputeOrder
from fshard.runtime.memory.memory_spaces import UpdateStaging, deallocate, memory_space, same_memory, update_stagings
from fshard.runtime.memory.optimizer_layout import (
    BASIS,
    KEPT,
    MASTER,
    RESIDUAL,
    BufferLayout,
    UpdateSlice,
    shard_layouts,
    start_buffers,
)
from fshard.runtime.memory.step_memory import StepMemory
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

Slice = tuple[Tensor, dict[str, Tensor]]
"""Views of a range of a shard: of the parameters, and of the optimizer's buffers by name."""


class Shard:
    """A rank's part of one group: its chunk of the parameters, and the optimizer's buffers beside it, all 1-D.

    ``layouts`` says where the buffers keep what belongs to a leaf. ``own`` are the elements of ``param`` that this rank
    updates; they are fewer where ``part`` says so, and then other ranks that hold the same chunk update the rest. Where
    what they get is rounded, so is ``param`` on all of them, and ``own`` is the buffer ``"master"``: the exact values.
    The buffer ``"residual"`` is what rounding has left out of this rank's part of sums over replicas.
    """

    def __init__(
        self,
        param: Tensor,
        opt: dict[str, Tensor],
        layouts: Mapping[str, BufferLayout] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.param, self.opt, self.layouts, self.part = param, opt, layouts or {}, part
        self.own = opt[MASTER] if MASTER in opt else self.held
        self._cut: tuple[tuple[UpdateSlice, ...], list[Slice]] = ((), [])

    @property
    def held(self) -> Tensor:
        """Return what all ranks hold of the elements that this rank updates."""
        return self.param if self.part is None else self.param[self.part[0] : self.part[1]]

    def with_param(self, param: Tensor) -> "Shard":
        """A shard with other parameters, which are exact, and the same optimizer state."""
        made = Shard(param, self.opt, self.layouts, self.part)
        return made if MASTER not in self.opt else Shard(param, self.opt | {MASTER: made.held.clone()}, *made.form)

    @property
    def form(self) -> tuple[Mapping[str, BufferLayout], tuple[int, int] | None]:
        """Say where its buffers and its part lie."""
        return self.layouts, self.part

    def __reduce__(self) -> tuple[Any, ...]:
        """A shard is pickled without its views."""
        return Shard, (self.param, self.opt, self.layouts, self.part)

    def slices(self, update_slices: tuple[UpdateSlice, ...]) -> list[Slice]:
        """The views that an optimizer updates, one pair an update slice; cached for the lifetime of the shard."""
        if self._cut[0] is not update_slices:
            self._cut = (update_slices, [(self.own[cut.begin : cut.end], self._states(cut)) for cut in update_slices])
        return self._cut[1]

    def _states(self, cut: UpdateSlice) -> dict[str, Tensor]:
        parts = {name: layout.part(cut) for name, layout in self.layouts.items() if name not in KEPT}
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
    if "update_gather" in group.wires:
        buffers[MASTER], layouts = same_memory(own), shard_layouts(group, mesh, opt)
    if group.feedback:
        buffers[RESIDUAL] = torch.zeros(own.shape, dtype=group.residual_dtype, device=own.device)
        layouts = shard_layouts(group, mesh, opt)
    if BASIS in layouts:
        buffers[BASIS] = start_basis(group, layouts[BASIS]).to(own.device)
    if group.kinds.hosted or group.kinds.opt != "device":
        place = memory_space(group.kinds.opt, mesh)
        buffers = {name: place.keep(value) for name, value in buffers.items()}
    return Shard(param, buffers, layouts, part)


def start_basis(group: Group, layout: BufferLayout) -> Tensor:
    """The second factors of products before the first step: random numbers that depend on paths alone."""
    out = torch.empty(layout.length, dtype=layout.dtype, device="cpu")
    for number, (begin, end) in layout.ranges.items():
        key = fold(0, f"{BASIS}:{group.leaves[number].path}")
        out[begin:end] = uniform(key, torch.arange(end - begin, device="cpu")).sub_(0.5)
    return out


class Shards(list[Shard]):
    """The shards of all groups, by group id, which a donated state hands on to the next one.

    Attributes:
        layouts: where each one keeps the optimizer's buffers.
        readers: end what still reads them beside the compute stream, such as the copy for a checkpoint.
        order: the stream that has worked on them.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        super().__init__(shards)
        self.layouts = tuple([shard.layouts for shard in self])
        self.readers: list[Callable[[], None]] = []
        self.order = ComputeOrder()
        self._calls: dict[int, tuple[Gradients, dict[tuple[int, ...], Calls]]] = {}

    def overwrite(self) -> "Shards":
        """The same, once nothing else reads them: they are about to be written."""
        while self.readers:
            self.readers[-1]()
            self.readers.pop()
        return self

    def follow(self, device: torch.device) -> None:
        """Let the current stream of a device work on them, after what worked on them before."""
        self.order.follow(device, lambda: self.tensors(range(len(self))))

    def calls(self, grads: "Gradients", due: tuple[int, ...]) -> "Calls":
        """The calls of the optimizer that update some groups, cached while gradients lie where they do."""
        held = self._calls.get(id(grads))
        if held is None or held[0] is not grads:
            if len(self._calls) == MOST:
                self._calls.clear()
            held = self._calls[id(grads)] = grads, {}
        made = held[1]
        if due not in made:
            made[due] = Calls(grads.alike({group: self[group] for group in due}))
        return made[due]

    def tensors(self, groups: Iterable[int]) -> list[Tensor]:
        """The parameters of some groups, and the optimizer's state of them."""
        return [tensor for group in groups for tensor in (self[group].param, *self[group].opt.values())]

    def clone(self) -> "Shards":
        """Shards of their own memory with the same values."""
        return Shards(shard.clone() for shard in self)


MOST = 8
"""Gradients whose calls shards keep: those of the updates of a step, and of the step before."""


class Slices(NamedTuple):
    """Slices that one call of the optimizer updates.

    Attributes:
        cut: the first of their update slices: what it says beside its range holds for all.
        params: the parameters.
        grads: their gradients.
        states: the optimizer's state of each.
        places: the group of each, by id, and its own update slice.
    """

    cut: UpdateSlice
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    places: list[tuple[int, UpdateSlice]]


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
        passing: the groups whose chunks have memory from their backward or reduction to their update alone.
        stagings: how groups that are not kept where they are updated come there, by group id.
        host: the groups that are updated on the host.
        left: what their sums over replicas have left for the next ones, by group id and the name of the buffer.
        views: those asked for so far.
    """

    shards: Mapping[int, Tensor]
    update_slices: Mapping[int, tuple[UpdateSlice, ...]]
    passing: frozenset[int]
    stagings: Mapping[int, UpdateStaging] = field(default_factory=dict)
    host: frozenset[int] = frozenset()
    left: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def drop(self) -> None:
        """Let go of gradients that will not be applied."""
        for group in self.passing:
            self.release(group)

    def release(self, group: int) -> None:
        """Let go of the gradient of a group in ``passing``."""
        deallocate(self.shards[group])
        if group in self.left:
            for buffer in self.left[group].values():
                deallocate(buffer)

    def buffers(self, group: int) -> list[Tensor]:
        """The gradient of a group, and what its sum over replicas has left."""
        return [self.shards[group], *self.left.get(group, {}).values()]

    def copied(self, groups: Collection[int]) -> "Gradients":
        """The gradients of some groups in memory of their own."""
        shards = {group: same_memory(self.shards[group]) for group in groups}
        held = {group: left for group, left in self.left.items() if group in groups}
        left = {group: {name: same_memory(one) for name, one in each.items()} for group, each in held.items()}
        return replace(self, shards=shards, left=left, views={})

    def cut(self, slices: Mapping[int, tuple[UpdateSlice, ...]]) -> "Gradients":
        """The same gradients in other slices."""
        return replace(self, update_slices=slices, views={})

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
                call = alike.setdefault(key, Slices(cut, [], [], [], []))
                call.params.append(param)
                call.grads.append(grad)
                call.states.append(state)
                call.places.append((group, cut))
        return list(alike.values())


def gradients_of(plan: Plan, memory: StepMemory, slices: Mapping[int, tuple[UpdateSlice, ...]]) -> Gradients:
    """Return what becomes of the gradients of a step.

    Args:
        memory: where they lie.
        slices: the update slices of each trainable group.
    """
    host = frozenset(group.id for group in plan.groups if group.offloaded)
    return Gradients(memory.homes, slices, memory.passing, update_stagings(plan), host, memory.left)
