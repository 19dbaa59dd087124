"""From a plan to what a schedule must know of its groups."""

from fshard.schedule.ops import GroupInfo
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan


def group_infos(plan: Plan) -> tuple[GroupInfo, ...]:
    """The sizes and needs of a plan's groups, by group id."""
    return tuple(_info(plan, group) for group in plan.groups)


def stage_numel(plan: Plan, group: Group) -> int:
    """Elements of staging that a group's reduction needs while it is in flight.

    On the host a rank receives its chunk from every peer; NCCL adds on the way and needs room for one, unless what
    travels is rounded: then all chunks arrive, to be added unrounded. Groups cut along a tensor dim are packed into
    rank-major order first.
    """
    if group.parts == 1:
        return 0
    received = group.numel - group.chunk
    if plan.mesh.device.type == "cuda":
        received = group.chunk if group.reduce_dtype == group.dtype else group.numel
    return received + (group.numel if group.staged else 0)


def _info(plan: Plan, group: Group) -> GroupInfo:
    item, read, sent = group.dtype.itemsize, group.compute_dtype.itemsize, group.reduce_dtype.itemsize
    cast = read if group.compute_dtype != group.dtype else 0
    peers, replicas = group.parts - 1, plan.mesh.axis_size(group.sum_axes)
    summed = 2 * (replicas - 1) * group.chunk * item // replicas
    return GroupInfo(
        name=group.name,
        full_bytes=group.numel * read * (2 if group.staged else 1),
        shard_bytes=group.chunk * (item + cast),
        grad_bytes=group.numel * sent if group.trainable else 0,
        stage_bytes=stage_numel(plan, group) * sent if group.trainable else 0,
        gathered=group.parts > 1,
        reduced=group.trainable and (group.parts > 1 or plan.mesh.axis_size(group.sum_axes) > 1),
        trainable=group.trainable,
        gather_sent=peers * group.chunk * read,
        reduce_sent=peers * group.chunk * sent if group.trainable else 0,
        sum_sent=summed if group.trainable else 0,
    )
