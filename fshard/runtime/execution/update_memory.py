"""The device memory of updates: beside the state, what is copied there and what the optimizer makes for itself;
and what they read, write and compute, which is their time.

An update is run on tensors without data, as a program is, and its operators say what they make. Ranks hold different
leaves, and their schedules must be the same: what counts is the rank that needs most.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fshard.optim.contract import Contract
from fshard.runtime.engine.activations import Activations
from fshard.runtime.engine.fake_fallback import quiet
from fshard.runtime.execution.pending_update import PendingUpdate
from fshard.runtime.execution.rounding import Rounding, rounded_groups
from fshard.runtime.execution.shards import Gradients, Shard, Shards
from fshard.runtime.execution.trace_program import traceable
from fshard.runtime.memory.memory_spaces import update_stagings
from fshard.runtime.memory.optimizer_layout import (
    UpdateSlice,
    beside_bytes,
    group_slices,
    most_bytes,
    shard_bytes,
    shard_layouts,
)
from fshard.schedule.footprint import Need
from fshard.schedule.infos import StateNeeds
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.torch_internals import FakeTensorMode

Limit = Callable[[str], int]
Cuts = tuple[UpdateSlice, ...]

NUMBERS = 1024
"""Bytes that do not count: an optimizer's count of steps, and the like."""

UPDATES = (1000, 2)
"""The numbers of the updates that are tried: some rules do more after a few, and some rates end early."""

SAMPLE = 1 << 14
"""Elements on which rules are tried that tensors without data do not do for."""


def state_needs(plan: Plan, opt: Contract, limit: Limit, donate: bool) -> StateNeeds:
    """Return what steps take on the device for what they update, beside one state.

    Args:
        opt: the optimizer.
        limit: from a leaf's path, the number of its clipping rule.
        donate: whether steps reuse the memory of the state.
    """
    copies = {} if donate else {group.id: _state_bytes(plan.mesh, group, opt) for group in plan.groups}
    work = update_needs(plan, opt, limit)
    here = {number: need.peak for number, need in work.items() if need.peak and not plan.groups[number].offloaded}
    return StateNeeds(here, copies, work)


def _state_bytes(mesh: Mesh, group: Group, opt: Contract) -> int:
    """Bytes of what a state keeps of a group on the device."""
    param = shard_bytes(group) if group.kinds.param == "device" else 0
    return param + (beside_bytes(group, mesh, opt) if group.kinds.opt == "device" else 0)


def update_needs(plan: Plan, opt: Contract, limit: Limit = lambda path: 0) -> dict[int, Need]:
    """Return what the update of each group needs where it runs, for its duration, on the rank that needs most of each.

    What it copies between the device and the memory of its host comes and goes. Where an optimizer reads values of
    tensors, it is not known what it makes for itself: then what is copied from host memory counts alone.

    Args:
        opt: the optimizer.
        limit: from a leaf's path, the number of its clipping rule; below 0 for one that is not updated.
    """
    plan, rounded, found = traceable(plan), rounded_groups(plan), {}
    known: dict[Hashable, Need] = {}
    for group in plan.groups:
        if group.trainable:
            key = _alike(group, opt, limit, group.id in rounded)
            if key not in known:
                known[key] = _most(plan, group, opt, limit, group.id in rounded)
            found[group.id] = known[key]
    return found


def _alike(group: Group, opt: Contract, limit: Limit, rounded: bool) -> Hashable:
    """Equal for groups whose updates need the same."""
    leaves = tuple([(leaf.shape, opt.hyper(leaf.path, leaf.shape), limit(leaf.path)) for leaf in group.leaves])
    wires = tuple(map(str, group.wires.values()))
    return leaves, group.starts, group.owned.chunk, group.dtype, group.kinds, wires, group.owned.gather_axes, rounded


def _most(plan: Plan, group: Group, opt: Contract, limit: Limit, rounded: bool) -> Need:
    """Return what the update of one group needs, on the rank that needs most."""
    copied, fullest = _copied(plan.mesh, group, opt), [*_fullest(plan.mesh, group, opt, limit)]
    needs = [_need(plan, mesh, group, opt, cuts, rounded) for mesh, cuts in fullest]
    peak = max([copied, *(need.peak for need in needs if need.peak > NUMBERS)])
    if copied:  # what the copies read and write is in ``copied``
        needs = [_need(plan, mesh, group, opt, cuts, rounded, staged=False) for mesh, cuts in fullest]
    flops, moved = (max([getattr(need, name) for need in needs], default=0) for name in ("flops", "moved"))
    return Need(peak, 0, flops, moved, copied=2 * copied)


def _copied(mesh: Mesh, group: Group, opt: Contract) -> int:
    """Bytes of what comes from the other memory than that where the update runs, and goes back."""
    param, state = group.kinds.moved if group.update_staged else (False, False)
    copied = group.owned.chunk * group.dtype.itemsize if param else 0
    return copied + (most_bytes(group.owned, mesh, opt) if state else 0)


def _fullest(mesh: Mesh, group: Group, opt: Contract, limit: Limit) -> Iterator[tuple[Mesh, Cuts]]:
    """The ranks of which one needs most, and what they update: those whose calls have most elements, or the longest.

    What an optimizer makes for itself grows with the slices of a call.
    """
    fullest: dict[Hashable, tuple[int, Mesh, Cuts]] = {}
    for rank in mesh.ranks(group.owned.gather_axes):
        seen = Mesh(mesh.sizes, mesh.axis_names, rank, mesh.device)
        cuts = tuple([cut for cut in group_slices(group.owned, seen, opt, limit) if cut.limit >= 0])
        sizes: dict[Hashable, int] = {}
        for cut in cuts:
            size, call = cut.end - cut.begin, (cut.hyper, cut.limit)
            sizes[call, "all"] = sizes.get((call, "all"), 0) + size
            sizes[call, "one"] = max(sizes.get((call, "one"), 0), size)
        for key, size in sizes.items():
            if size > fullest.get(key, (0,))[0]:
                fullest[key] = size, seen, cuts
    yield from {seen.rank: (seen, cuts) for _, seen, cuts in fullest.values()}.values()


def _need(plan: Plan, mesh: Mesh, group: Group, opt: Contract, cuts: Cuts, rounded: bool, staged: bool = True) -> Need:
    """Return what the update of one group needs on one rank."""
    plan = replace(plan, mesh=mesh)
    rounding = Rounding(plan, 0, frozenset([group.id])) if rounded else None
    scale = [None] * (1 + max([cut.limit for cut in cuts]))
    for steps in UPDATES:
        with FakeTensorMode(allow_non_fake_inputs=True), quiet():
            shards, grads, held = _without_data(plan, group, opt, cuts, staged)
            watch = Activations(held)
            try:
                with watch:
                    PendingUpdate(opt, steps * (opt.steps or 1) - 1, grads, scale, rounding).apply(shards, [group.id])
            except Exception:  # of a rule that reads values, of a rate that ends; or a step will tell
                continue
        return watch.take()
    return _sampled(group, opt, cuts)


def _without_data(
    plan: Plan, group: Group, opt: Contract, cuts: Cuts, staged: bool
) -> tuple[Shards, Gradients, list[Tensor]]:
    """One rank's shard and gradient of a group, and all tensors of both."""
    device, layouts = plan.mesh.device, shard_layouts(group, plan.mesh, opt)
    made = {name: torch.empty(layout.length, dtype=layout.dtype, device=device) for name, layout in layouts.items()}
    param, grad = [torch.empty(group.owned.chunk, dtype=group.dtype, device=device) for _ in range(2)]
    stagings = {at: each for at, each in update_stagings(plan).items() if staged and at == group.id}
    grads = Gradients({group.id: grad}, {group.id: cuts}, frozenset(), stagings)
    shards = Shards([Shard(param, made, layouts)] * (group.id + 1))
    return shards, grads, [param, grad, *made.values()]


def _sampled(group: Group, opt: Contract, cuts: Cuts) -> Need:
    """Return what a rule that reads values needs.

    What it does for a few zeros, to scale; nothing if that fails, too.
    """
    peak, flops, moved = 0, 0, 0
    for hyper in {cut.hyper: None for cut in cuts if isinstance(opt.grain(cut.hyper), int)}:
        numel = sum([cut.end - cut.begin for cut in cuts if cut.hyper == hyper])
        watch = Activations([])
        try:
            with torch.no_grad():
                param, grad = [torch.zeros(min(numel, SAMPLE), dtype=group.dtype, device="cpu") for _ in range(2)]
                state = opt.init(param, hyper)
                watch.know([param, grad, *state.values()])
                with watch:
                    opt.update([param], [grad], [state], step=2 * (opt.steps or 1), hyper=hyper)
        except Exception:
            return Need(0, 0, 0)
        need = watch.take()
        peak = max(peak, need.peak * numel // len(param))
        flops, moved = flops + need.flops * numel // len(param), moved + need.moved * numel // len(param)
    return Need(peak, 0, flops, moved)
