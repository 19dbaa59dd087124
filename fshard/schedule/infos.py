"""From a plan to what a schedule must know of its groups."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fshard.schedule import schedule_refusals
from fshard.schedule.footprint import Need
from fshard.schedule.ops import GroupInfo
from fshard.schedule.transfers import COLLECTIVES, HOST, KINDS, SECOND, STATE, Transfer
from fshard.sharding.layout import Group
from fshard.sharding.low_rank import left_numel, most_travels
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.sharding.wire import WireFormat


@dataclass(frozen=True)
class StateNeeds:
    """Memory that a step takes on the device for what it updates, beside one state: bytes by group id.

    Attributes:
        updates: what the update takes for its duration.
        copies: a copy of what the state has of a group, where a step does not reuse its memory.
        work: the operations of an update, the bytes that it reads and writes, and those that it copies from the other
            memory and back.
    """

    updates: Mapping[int, int] = field(default_factory=dict)
    copies: Mapping[int, int] = field(default_factory=dict)
    work: Mapping[int, Need] = field(default_factory=dict)


NOTHING = StateNeeds()


def group_infos(plan: Plan, state: StateNeeds = NOTHING, secondary: Axes = ()) -> tuple[GroupInfo, ...]:
    """The sizes and needs of a plan's groups, by group id.

    Args:
        state: what the optimizer's updates take, and copies of the state.
        secondary: the axes over which groups stay sharded between their uses.

    Raises:
        PlanError: one of them is not an axis of the mesh.
    """
    unknown = [axis for axis in secondary if axis not in plan.mesh.axis_names]
    if unknown:
        names = ", ".join(plan.mesh.axis_names)
        raise schedule_refusals.bad_policy([f"fs.secondary names {unknown[0]!r}, and the axes of the mesh are {names}"])
    infos = (_info(plan, group, state) for group in plan.groups)
    return tuple(_with_second(plan, group, info, secondary) for group, info in zip(plan.groups, infos, strict=True))


def communicators(plan: Plan, secondary: Axes = (), program: Iterable[Axes] = ()) -> list[tuple[str, Axes]]:
    """The communicators of a step: their roles and axes, in one order on all ranks.

    Args:
        plan: the plan, whose groups have transfers.
        secondary: the axes over which groups are gathered again.
        program: mesh axes of the collectives that the program itself calls.
    """
    order = [*KINDS, COLLECTIVES]
    needs = {need for group in plan.groups for need in _needs(group, secondary)} | {(COLLECTIVES, a) for a in program}
    needed = [need for need in needs if plan.mesh.axis_size(need[1]) > 1]
    return sorted(needed, key=lambda need: (order.index(need[0]), need[1]))


def between(groups: Iterable[GroupInfo]) -> tuple[tuple[str, Axes], ...]:
    """The communicators of transfers that leave between steps, over replicas that train apart."""
    moves = [move for info in groups for move in info.transfers if move.row.stage == "between" and move.sent]
    return tuple(dict.fromkeys((move.row.role, tuple(move.axes.split("+"))) for move in moves))


def _needs(group: Group, secondary: Axes) -> Iterator[tuple[str, Axes]]:
    """The roles of the transfers of a group, and their axes."""
    kinds = {"all_gather": group.gather_axes, "regather": secondary_axes(group, secondary)}
    if group.trainable:
        kinds |= {"reduce_scatter": group.scatter_axes, "replica_reduce": group.rest_axes}
    yield from ((KINDS[kind].role, axes) for kind, axes in kinds.items())
    if group.trainable and group.opt_parts > 1:  # the same communicators scatter gradients again
        yield KINDS["update_gather"].role, group.opt_axes


def fast_axes(plan: Plan) -> Axes:
    """The axes over which groups may stay sharded between their uses: the last, where others shard groups, too.

    Ranks along the last axis of a mesh are neighbours, which share a host where any do.
    """
    last, mesh = plan.mesh.axis_names[-1:], plan.mesh
    fast = [secondary_axes(group, last) for group in plan.groups]
    wide = any(
        axes and mesh.axis_size(g.gather_axes) > mesh.axis_size(axes) > 1
        for g, axes in zip(plan.groups, fast, strict=True)
    )
    return last if wide else ()


def secondary_axes(group: Group, secondary: Axes) -> Axes:
    """The axes over which a group is gathered again in a step; none if that is done as the first time."""
    fast = tuple(axis for axis in group.gather_axes if axis in secondary and not group.row)
    return fast if group.parts > 1 and len(fast) < len(group.gather_axes) else ()


def _with_second(plan: Plan, group: Group, info: GroupInfo, secondary: Axes) -> GroupInfo:
    """Return what schedules know of a group that stays sharded over some axes, in the dtype of compute."""
    fast = secondary_axes(group, secondary)
    if not fast:
        return info
    part = group.numel // plan.mesh.axis_size(fast) * group.compute_dtype.itemsize
    sent = (plan.mesh.axis_size(fast) - 1) * part
    again = Transfer("regather", SECOND, "param", sent, 0, "+".join(fast))
    order = sorted((*info.transfers, again), key=lambda transfer: [*KINDS].index(transfer.kind))
    return dataclasses.replace(info, transfers=tuple(order), second_bytes=part)


def stage_numel(plan: Plan, group: Group) -> int:
    """Elements of staging that a group's reduction needs while it is in flight.

    On the host a rank receives its chunk from every peer; NCCL adds on the way and needs room for one, unless what
    travels is rounded: then all chunks arrive, to be added unrounded. Groups cut along a tensor dim are packed into
    rank-major order first.
    """
    if group.scatter_parts == 1:
        return 0
    if "reduce_scatter" in group.wires:
        return group.numel if group.staged else 0
    received = group.numel - group.scatter_chunk
    if plan.mesh.device.type == "cuda":
        received = group.scatter_chunk if group.reduce_dtype == group.dtype else group.numel
    return received + (group.numel if group.staged else 0)


def rows_travel(group: Group, replicas: int) -> bool:
    """Tell whether each replica sends its whole gradient shard to each other one, to be summed there.

    An all-reduce sends ``2 (n - 1) / n`` shards in the master dtype. With two replicas, or with more and a shorter
    dtype, rows are no more than that.
    """
    return replicas * group.sum_dtype.itemsize <= 2 * group.dtype.itemsize


def _unpacked(plan: Plan, form: WireFormat | None, rows: int, numel: int) -> int:
    """Bytes of the float32 numbers that a device makes at once of packed rows, before it adds them up."""
    apart = plan.mesh.device.type == "cuda" and form is not None and form.largest is not None
    return 4 * rows * numel if apart else 0


def _summed(plan: Plan, group: Group, replicas: int) -> tuple[int, int]:
    """Bytes that a rank sends to complete a gradient that holds all microbatches, and what it needs besides."""
    own, item, wire = group.owned.chunk, group.dtype.itemsize, group.sum_dtype.itemsize
    form = group.wires.get("replica_reduce")
    if form is not None and form.rank:
        size = most_travels(group.owned, form.rank) * group.residual_dtype.itemsize
        rows = rows_travel(group, replicas)
        return (replicas - 1) * size if rows else 2 * (replicas - 1) * size // replicas, (1 + rows * replicas) * size
    if form is not None:
        parts, others, size = group.opt_parts if group.second_scatter else 1, replicas - 1, form.nbytes(own)
        needed = 2 * parts * size * (parts > 1) + (1 + replicas) * size * (others > 0)
        needed += _unpacked(plan, form, max(parts * (parts > 1), replicas * (others > 0)), own)
        return (parts - 1 + others) * size, needed
    cast = group.sum_dtype != group.dtype
    sent = needed = 0
    if group.second_scatter:
        sent = (group.opt_parts - 1) * own * wire
        needed = 2 * group.chunk * wire if cast else sent
    if replicas > 1 and rows_travel(group, replicas):
        sent, needed = sent + (replicas - 1) * own * wire, needed + (replicas + cast) * own * wire
    elif replicas > 1:
        sent += 2 * (replicas - 1) * own * item // replicas
    return sent, needed


def _info(plan: Plan, group: Group, state: StateNeeds) -> GroupInfo:
    item, wire = group.dtype.itemsize, group.reduce_dtype.itemsize
    kept = None if group.kinds.hosted else group.resident_cast
    cast = kept[0] * kept[1].itemsize if kept else 0
    scattered = group.scatter_chunk if group.trainable else group.chunk
    own = group.owned.chunk * item
    copied = own if group.kinds.moved[0] else 0  # from host memory, for the update
    info = GroupInfo(
        name=group.name,
        full_bytes=_full(group),
        shard_bytes=scattered * item if group.packed is None else group.packed.nbytes(group.chunk),
        grad_bytes=group.numel * wire if group.trainable else 0,
        trainable=group.trainable,
        own_bytes=own if group.trainable and group.second_scatter else 0,
        update_bytes=state.updates.get(group.id, copied if group.trainable and not group.offloaded else 0),
        left_bytes=left_numel(group) * group.residual_dtype.itemsize,
        cast_bytes=cast,
        copy_bytes=state.copies.get(group.id, 0),
    )
    return dataclasses.replace(info, transfers=_path(plan, group, info))


def _full(group: Group) -> int:
    """Bytes of a gathered group in the form in which units read it, and of the staging of its pieces."""
    if group.row:
        return group.wires["all_gather"].nbytes(group.numel)
    return group.numel * group.compute_dtype.itemsize * (2 if group.staged else 1)


def _path(plan: Plan, group: Group, info: GroupInfo) -> tuple[Transfer, ...]:
    """The transfers that a group needs, in their order."""
    path = []
    own, replicas = group.owned.chunk * group.dtype.itemsize, plan.mesh.axis_size(group.rest_axes)
    if group.trainable and group.opt_parts > 1 and own:
        form, axes = group.wires.get("update_gather"), "+".join(group.opt_axes)
        size = own if form is None else form.nbytes(group.owned.chunk)
        staging = 0 if form is None else (1 + group.opt_parts) * size
        staging += _unpacked(plan, form, group.opt_parts, group.owned.chunk)
        sent = (group.opt_parts - 1) * size
        path.append(Transfer("update_gather", STATE, STATE, sent, staging, axes, wire=_name(form)))
    if group.gathered:
        form = group.wires.get("all_gather")
        size = group.chunk * group.compute_dtype.itemsize if form is None else form.nbytes(group.chunk)
        staging = group.parts * size if form is not None and group.travels and not group.row else 0
        axes = "+".join(group.gather_axes)
        path.append(Transfer("all_gather", STATE, "param", (group.parts - 1) * size, staging, axes, wire=_name(form)))
    if group.trainable and _reduced(group, info, replicas):
        path += _reductions(plan, group, info, replicas)
    return tuple(path)


def _reduced(group: Group, info: GroupInfo, replicas: int) -> bool:
    """Tell whether a gradient needs communication, or a copy."""
    summed = group.scatter_parts > 1 or replicas > 1 or group.holders > 1
    return summed or group.offloaded or bool(info.left_bytes)


def _over_stages(plan: Plan, group: Group, own: str) -> list[Transfer]:
    """The sum of a gradient over the stages that hold its leaves."""
    if group.holders == 1 or plan.whole is None or plan.whole.stages is None:
        return []
    size = (group.holders - 1) * group.owned.chunk * group.dtype.itemsize
    return [Transfer("stage_sum", own, own, size, size, plan.whole.stages.axis)]


def _reductions(plan: Plan, group: Group, info: GroupInfo, replicas: int) -> list[Transfer]:
    """The transfers of a group's gradient."""
    wire = group.reduce_dtype.itemsize
    form = group.wires.get("reduce_scatter") if group.scatter_parts > 1 else None
    size = group.scatter_chunk * wire if form is None else form.nbytes(group.scatter_chunk)
    sent, staging = (group.scatter_parts - 1) * size, stage_numel(plan, group) * wire
    staging += 0 if form is None else 2 * group.scatter_parts * size  # what is sent, and what arrives
    staging += _unpacked(plan, form, group.scatter_parts, group.scatter_chunk)
    # Staging of the dtype of the shard has room for a chunk: the first sum is made there.
    late = form is None and staging > 0 and info.shard_bytes == info.grad_bytes - sent
    over = "+".join(group.scatter_axes)
    made = [Transfer("reduce_scatter", "grad", "shard", sent, staging, over, late, _name(form))]
    summed, staging = _summed(plan, group, replicas)
    own = "own" if info.own_bytes else "shard"
    if summed or info.left_bytes:
        axes = group.sum_axes if group.second_scatter else group.rest_axes
        form = group.wires.get("replica_reduce")
        made.append(Transfer("replica_reduce", "shard", own, summed, staging, "+".join(axes), wire=_name(form)))
    made += _over_stages(plan, group, own)
    if group.offloaded and group.owned.chunk:  # it has no feedback
        size = group.owned.chunk * group.dtype.itemsize
        made.append(Transfer("offload", own if summed else "shard", HOST, size))
    return made


def _name(form: WireFormat | None) -> str:
    """A wire format in a schedule."""
    return "" if form is None else str(form)
