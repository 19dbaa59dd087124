"""Compare the gradients of leaves that several ranks hold copies of, for ``debug=True``."""

from collections.abc import Mapping

from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.ranks import Ranks
from fshard.errors import ReplicationError, lines
from fshard.runtime.comm import Communicator, exchange_text
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan

RELATIVE, FLOOR = 1e-3, 1e-6
"""Differences below these fractions of the leaf's and of the group's largest gradient are rounding."""


def check_copies(plan: Plan, grads: Mapping[int, Tensor], comm: Communicator) -> None:
    """Compare the gradients of leaves over the axes that hold copies of them and are not data axes.

    Ranks along such an axis work on the same rows, and nothing adds up their gradients: copies drift apart unless each
    rank has the whole gradient. It has not if a leaf meets values that differ between ranks without a ``pvary``.

    Args:
        grads: this rank's part of the gradients, by group id.
        comm: the control communicator over the whole mesh.

    Raises:
        ReplicationError: some differ; all ranks raise it.
    """
    over = {group.id: copied(group, plan) for group in plan.groups if group.trainable}
    if not any(over.values()):
        return
    found: list[str] = []
    for number, axes in over.items():
        if axes:
            found += _problems(plan.groups[number].owned, axes, plan.mesh, grads[number])
    problems = dict.fromkeys(line for text in exchange_text(comm, "\n".join(found)) for line in text.splitlines())
    if problems:
        raise ReplicationError(
            lines(
                "gradients differ between ranks that hold copies of one leaf, and work on the same rows:",
                problems,
                "Pass a leaf that meets values which differ between these ranks, such as slices of the sequence, "
                "through fs.parallel.shared or fs.collectives.pvary: its gradient is then the sum over the ranks. The "
                "loss must be the same on all of them: check whether a psum is missing.",
            )
        )


def copied(group: Group, plan: Plan) -> Axes:
    """The axes over which ranks hold copies of a group and work on the same rows."""
    held = (*plan.data_axes, *group.leaves[0].compute.axes)
    return tuple(axis for axis in plan.mesh.axis_names if axis not in held and plan.mesh.shape[axis] > 1)


def _problems(group: Group, axes: Axes, mesh: Mesh, grad: Tensor) -> list[str]:
    rows = raw.gather(Ranks(mesh, axes), grad.to(mesh.device))()
    largest, part = float(rows.abs().max()) if rows.numel() else 0.0, mesh.index(group.gather_axes)
    out = []
    for number, leaf in enumerate(group.leaves):
        begin, end = group.shard_range(number, part)
        if begin == end:
            continue
        mine = rows[:, begin:end]
        far = (mine - mine[0]).abs()
        if float(far.max()) > RELATIVE * float(mine.abs().max()) + FLOOR * largest:
            row, at = divmod(int(far.argmax()), end - begin)
            ranks = mesh.ranks(axes)
            first, other = mine[0, at].item(), mine[row, at].item()
            out.append(f"{leaf.path}  {list(leaf.shape)}: {first:.6g} on rank {ranks[0]}, {other:.6g} on {ranks[row]}")
    return out
