"""The time of shards on a device or on its host: copies between them, casts, and updates on either side."""

from collections.abc import Iterator
from dataclasses import replace

from fshard.foresight.packing_time import packed_need
from fshard.schedule.footprint import Need
from fshard.schedule.machines import Speed
from fshard.schedule.step_program import StepProgram
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan

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
