"""Checks of the arguments of this room's functions against the plan, before they communicate.

Inside of a step a leaf knows its path, and so its spec. These checks run while the program is traced on fake tensors:
alike on all ranks, before the first collective. Of other tensors, such as casts of leaves or leaves under transforms
of torch.func, only shapes are checked.
"""

from torch import Tensor

from fshard import collectives
from fshard.collectives.scope import in_scope
from fshard.errors import PlanError
from fshard.model.unit import slot_of
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of

EXPERTS = "grouped_linear"
"""The function whose axis is a data axis: each of its ranks has its own tokens."""


def check_cut(tensor: Tensor | None, axis: str, dim: int, what: str, rule: str) -> None:
    """Refuse a leaf of a step unless exactly this axis cuts this dim; ``rule`` is the rule to recommend."""
    known = _known(tensor, axis, what)
    if known is None:
        return
    leaf, plan = known
    entries = [axes_of(entry) for entry in leaf.compute.dims]
    here = entries[dim] if dim < len(entries) else ()
    if here == (axis,):
        return
    cut = [number for number, axes in enumerate(entries) if axis in axes]
    how = f"is cut by {axis!r} along dim {cut[0]}" if cut else f"is whole on each of the {plan.mesh.shape[axis]} ranks"
    shape = [n // plan.mesh.shape[axis] if number == dim else n for number, n in enumerate(leaf.shape)]
    raise PlanError(
        f"{what}: {leaf.path} {list(leaf.shape)} {how} of {axis!r} in compute ({leaf.compute}), but must be cut along "
        f"dim {dim}, to {shape}: give it {rule}"
    )


def check_whole(tensor: Tensor | None, axis: str, what: str) -> None:
    """Refuse a leaf of a step that an axis cuts."""
    known = _known(tensor, axis, what)
    if known is not None and axis in known[0].compute.axes:
        leaf = known[0]
        raise PlanError(
            f"{what}: {leaf.path} {list(leaf.shape)} is cut by {axis!r} in compute ({leaf.compute}), but every rank "
            f"needs all of it: leave {axis!r} out of its spec"
        )


def divided(count: int, axis: str, what: str, mesh: Mesh | None = None) -> int:
    """A rank's part of a number, which the axis must divide."""
    parts = collectives.axis_size(axis, mesh=mesh)
    if count % parts:
        raise PlanError(
            f"{count} {what} over the {parts} ranks of axis {axis!r}: {count} is not a multiple of {parts}. Choose "
            f"{parts * -(-count // parts)} {what}, or a size of {axis!r} that divides {count}"
        )
    return count // parts


def check_data_axis(axis: str, what: str, mesh: Mesh | None = None) -> None:
    """Inside of a step, refuse an axis whose ranks have the same tokens."""
    _, data = in_scope(axis, mesh)
    if data and axis not in data:
        raise PlanError(
            f"{what}: axis {axis!r} is not a data axis here (data axes: {data}): all ranks along it would have the "
            f"same tokens. Name it in batch=, and give each rank tokens of its own"
        )


def cut_along(tensor: Tensor, dim: int) -> tuple[str, ...]:
    """The axes of several ranks that cut a dim of the batch, of the step that a leaf belongs to; else none."""
    slot = slot_of(tensor)
    plan = getattr(slot.engine, "plan", None) if slot is not None else None
    if not isinstance(plan, Plan) or dim >= len(plan.batch.dims):
        return ()
    return tuple([axis for axis in axes_of(plan.batch.dims[dim]) if plan.mesh.shape[axis] > 1])


def path_of(tensor: Tensor) -> str:
    """The path of a leaf of a step; empty for other tensors."""
    slot = slot_of(tensor)
    return slot.path if slot is not None else ""


def _known(tensor: Tensor | None, axis: str, what: str) -> tuple[Leaf, Plan] | None:
    slot = slot_of(tensor) if tensor is not None else None
    plan = getattr(slot.engine, "plan", None) if slot is not None else None
    if slot is None or not isinstance(plan, Plan) or axis not in plan.mesh.axis_names:
        return None
    if axis in plan.data_axes and what != EXPERTS:
        raise PlanError(
            f"{what}: axis {axis!r} is a data axis (batch={plan.batch}), so its ranks work on different rows, and sums "
            f"over it would mix them: leave {axis!r} out of batch="
        )
    plan = plan.whole or plan  # a stage runs code between units that reads leaves of others
    return plan.leaves[slot.path], plan
