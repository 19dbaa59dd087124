"""The time of shards on a device and its host: wire formats, copies between both, casts, and updates on either side.

The functions that pack and unpack run on tensors without data. What their operators read and write is their time, as
for units. So a format pays where a link is slower than that.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fshard.runtime.comm import Done
from fshard.runtime.comm.packing import packed, unpack
from fshard.runtime.engine.activations import Activations
from fshard.runtime.execution.power_sgd import Basis, Product, low_rank_sum
from fshard.runtime.execution.wires import Residual
from fshard.schedule.footprint import Need
from fshard.schedule.machines import Speed
from fshard.schedule.step_program import StepProgram
from fshard.sharding.layout import Group
from fshard.sharding.low_rank import Matrix, left_numel, matrices
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.wire import WireFormat

SOME = 1 << 16
"""Elements that are packed to find the bytes of one."""

Work = Iterator[tuple[str, Need]]
"""Kinds of ops of a group, and what formats add to them."""


def packing_seconds(plan: Plan, stages: StepProgram, speed: Speed) -> dict[tuple[str, str], float]:
    """The seconds that the formats of a plan's transfers add to the ops of a step, by kind and target.

    Args:
        stages: what the step does: groups that it does not read have no gathers.
        speed: of the device.
    """
    found: Counter[tuple[str, str]] = Counter()
    read = {number for ids in stages.reads.values() for number in ids}
    for group in [group for group in plan.groups if group.wires and group.chunk]:
        work = [*_gathers(group)] if group.id in read else []
        if group.id in stages.fillings:
            filling = stages.fillings[group.id]
            work += _reductions(group, plan.mesh, filling.last > filling.first)
        if group.id in stages.updates:
            work += _updates(group)
        for kind, need in work:
            found[kind, group.name] += speed.seconds(need)  # type: ignore[assignment]
    return dict(found)


def _gathers(group: Group) -> Work:
    form = group.wires.get("all_gather")
    if form is not None and group.gathered and not group.row:
        yield "wait all_gather", _unpacked(form, group.compute_dtype, group.numel)


def _updates(group: Group) -> Work:
    """A shard is packed once an update, however often it is gathered."""
    form = group.wires.get("all_gather")
    if form is not None and group.packed is None and not group.kinds.hosted:  # the host packs what it keeps
        yield "update", packed_need(form, group.dtype, group.chunk)
        if not group.gathered:  # it is rounded where it lies
            yield "update", _unpacked(form, group.compute_dtype, group.chunk)
    form, own = group.wires.get("update_gather"), group.owned.chunk
    if form is not None and group.opt_parts > 1:
        yield "update_gather", _moved(3 * own * group.dtype.itemsize)  # the difference
        yield "update_gather", packed_need(form, group.dtype, own)
        yield "wait update_gather", _unpacked(form, group.dtype, group.chunk, add=True)


def _reductions(group: Group, mesh: Mesh, add: bool) -> Work:
    """Gradients on their way to be summed; ``add`` says whether microbatches are added up."""
    form = group.wires.get("reduce_scatter")
    if form is not None and group.scatter_parts > 1:
        yield "reduce_scatter", packed_need(form, group.dtype, group.numel)
        yield from _rows("wait reduce_scatter", form, group.dtype, group.scatter_chunk, group.scatter_parts, add)
    form = group.wires.get("replica_reduce")
    replicas, wait = mesh.axis_size(group.rest_axes), "wait replica_reduce"
    if form is None:
        return
    if form.rank:
        yield from _product(group, form.rank) if replicas > 1 else ()
        return
    own, start = group.owned.chunk, "replica_reduce"
    if group.second_scatter:
        yield start, packed_need(form, group.dtype, group.chunk)
        yield from _rows(wait, form, group.dtype, own, group.opt_parts)
        start = wait  # the parts are summed over replicas when they have been scattered
    if replicas > 1:
        yield start, packed_need(form, group.dtype, own)
        yield from _rows(wait, form, group.dtype, own, replicas)
        if group.feedback:
            yield start, _moved(own * (group.dtype.itemsize + 2 * group.residual_dtype.itemsize))
            yield start, _unpacked(form, group.residual_dtype, own, add=True)


def _rows(wait: str, form: WireFormat, dtype: torch.dtype, numel: int, rows: int, add: bool = False) -> Work:
    """The sum of packed rows in their order."""
    yield wait, _unpacked(form, dtype, numel, add)
    yield wait, _unpacked(form, dtype, numel * (rows - 1), add=True)


def packed_need(form: WireFormat, dtype: torch.dtype, numel: int) -> Need:
    """Return what it needs to pack so many elements."""
    return _moved(numel * _bytes_packed(form, dtype))


def _unpacked(form: WireFormat, dtype: torch.dtype, numel: int, add: bool = False) -> Need:
    return _moved(numel * _bytes_unpacked(form, dtype, add))


def _moved(size: float) -> Need:
    """Bytes that are read and written."""
    return Need(0, 0, 0, round(size))


@functools.cache
def _bytes_packed(form: WireFormat, dtype: torch.dtype) -> float:
    """Bytes read and written for each element that is packed."""
    source = torch.empty(max(SOME, form.block), dtype=dtype, device="meta")
    return _counted(lambda: packed(source, form)).moved / source.numel()


@functools.cache
def _bytes_unpacked(form: WireFormat, dtype: torch.dtype, add: bool) -> float:
    """Bytes read and written for each element that is unpacked, or unpacked and added."""
    out = torch.empty(max(SOME, form.block), dtype=dtype, device="meta")
    given = torch.empty(form.nbytes(out.numel()), dtype=torch.uint8, device="meta")
    return _counted(lambda: unpack(given, form, out, add)).moved / out.numel()


def _product(group: Group, rank: int) -> Work:
    """A sum as products of low rank, of the first shard: matrices come before vectors."""
    owned = group.owned
    basis = left_numel(group) - owned.chunk
    start, both = _low_rank(tuple(matrices(owned, 0, rank)), owned.chunk, basis, group.residual_dtype, rank)
    yield "replica_reduce", start
    yield "wait replica_reduce", Need(0, 0, both.flops - start.flops, both.moved - start.moved)


@functools.cache
def _low_rank(found: tuple[Matrix, ...], numel: int, basis: int, dtype: torch.dtype, rank: int) -> tuple[Need, Need]:
    """Return what the start of such a sum takes, and all of it."""

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    residual = Residual(empty(numel), 1.0, empty(numel))
    factors = Basis(empty(basis), empty(basis), found, rank)

    def start() -> Product:
        return low_rank_sum(empty(numel), residual, factors, lambda part: Done())

    return _counted(start), _counted(lambda: start().wait())


def _counted(work: Callable[[], object]) -> Need:
    """Return what the operators of some work need."""
    work()  # tables of formats are made once
    seen = Activations([])
    with seen:
        work()
    return seen.take()


Seconds = dict[tuple[str, str], float]
"""Seconds by the kind and the target of an op."""


def host_copies(plan: Plan, stages: StepProgram, speed: Speed) -> Seconds:
    """Return what copies between a device and its host's memory take, beside compute, by the op that starts them."""
    found = {}
    for group in _read(plan, stages):
        if group.kinds.hosted and group.travels:
            form = group.wires.get("all_gather")
            size = group.chunk * group.compute_dtype.itemsize if form is None else form.nbytes(group.chunk)
            found["all_gather", group.name] = size / speed.copies_per_s
    for group in plan.groups:
        if group.id in stages.updates and group.offloaded and group.owned.chunk:
            found["offload", group.name] = group.owned.chunk * group.dtype.itemsize / speed.copies_per_s
    return found


def update_seconds(group: Group, need: Need, speed: Speed, host: Speed) -> float:
    """Return what an update takes: of the device or of the host, with what comes from the other side and goes back.

    What is gathered in another dtype is made where the shard is kept, once an update; so is what is packed on the host.
    """
    made = (host if group.kinds.hosted else speed).seconds(_made(group))
    where = host if group.offloaded else speed
    return made + need.copied / speed.copies_per_s + where.seconds(replace(need, copied=0))


def frozen_seconds(plan: Plan, stages: StepProgram, speed: Speed, host: Speed) -> float:
    """Return what a step takes to make what is gathered of frozen groups in another dtype."""
    frozen = (group for group in _read(plan, stages) if group.id not in stages.updates)
    return sum((host if group.kinds.hosted else speed).seconds(_made(group)) for group in frozen)


def _read(plan: Plan, stages: StepProgram) -> Iterator[Group]:
    """The groups that a step reads."""
    read = {number for ids in stages.reads.values() for number in ids}
    return (group for group in plan.groups if group.id in read)


def _made(group: Group) -> Need:
    """Return what the copy of a shard needs that is gathered in place of it."""
    if group.resident_cast is None:
        return Need(0, 0, 0)
    form = group.wires.get("all_gather")
    if form is not None and not group.kinds.hosted:
        return Need(0, 0, 0)  # formats on the device are told of by ``packing``
    if form is not None:
        return packed_need(form, group.dtype, group.chunk)
    return Need(0, 0, 0, group.chunk * (group.dtype.itemsize + group.compute_dtype.itemsize))
