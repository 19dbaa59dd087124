"""From a plan to what a schedule must know of its groups."""

from fshard.schedule.ops import GroupInfo
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan


def group_infos(plan: Plan) -> tuple[GroupInfo, ...]:
    """The sizes and needs of a plan's groups, by group id."""
    return tuple(_info(plan, group) for group in plan.groups)


def stage_numel(plan: Plan, group: Group) -> int:
    """Elements of staging that a group's reduction needs while it is in flight.

    On the host a rank receives its chunk from every peer; NCCL adds on the way and needs room for one. Groups cut along
    a tensor dim are packed into rank-major order first.
    """
    if group.parts == 1:
        return 0
    received = group.chunk if plan.mesh.device.type == "cuda" else group.numel - group.chunk
    return received + (group.numel if group.staged else 0)


def _info(plan: Plan, group: Group) -> GroupInfo:
    item = group.dtype.itemsize
    peers, replicas = group.parts - 1, plan.mesh.axis_size(group.sum_axes)
    scattered = peers * group.chunk * item
    summed = 2 * (replicas - 1) * group.chunk * item // replicas
    return GroupInfo(
        name=group.name,
        full_bytes=group.numel * item * (2 if group.staged else 1),
        shard_bytes=group.chunk * item,
        grad_bytes=group.numel * item if group.trainable else 0,
        stage_bytes=stage_numel(plan, group) * item if group.trainable else 0,
        gathered=group.parts > 1,
        reduced=group.trainable and (group.parts > 1 or plan.mesh.axis_size(group.sum_axes) > 1),
        trainable=group.trainable,
        gather_sent=scattered,
        reduce_sent=scattered if group.trainable else 0,
        sum_sent=summed if group.trainable else 0,
    )
