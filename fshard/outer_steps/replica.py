"""The plan of one replica: that of the user, on the ranks of this replica alone."""

from dataclasses import replace

from fshard.errors import PlanError, lines
from fshard.sharding.layout import make_groups
from fshard.sharding.part_mesh import ReplicaMesh, joined_part
from fshard.sharding.plan import Plan


def plan_of_replica(plan: Plan, over: str, grid: int) -> Plan:
    """The plan of this rank's replica: the same leaves and rules, on a mesh where the axis of replicas has one rank.

    Args:
        plan: of all replicas.
        over: the axis along which they lie.
        grid: leaves begin, and shards end, at multiples of this many elements.

    Raises:
        PlanError: the mesh has no such axis, a leaf is sharded along it, or it does not cut the batch.
    """
    mesh = plan.mesh
    mesh.axis_size(over)
    cut = [leaf for leaf in plan.leaves.values() if over in (*leaf.at_rest.axes, *leaf.compute.axes, *leaf.opt_axes)]
    if cut:
        rows = [f"{leaf.path}  {list(leaf.shape)}  {leaf.opt or leaf.at_rest}" for leaf in cut]
        remedy = f"Each replica has all of a model: shard these over other axes than {over!r}."
        raise PlanError(lines(f"fs.outer(over={over!r}): these leaves are sharded along that axis:", rows, remedy))
    if over not in plan.batch.axes:
        raise PlanError(
            f"fs.outer(over={over!r}): batch={plan.batch} is not cut along that axis, so all replicas would train on "
            f"the same rows: name it, such as batch=fs.P(({over!r}, ...))"
        )
    part = joined_part(mesh, over, ReplicaMesh)
    owners = {leaf.path: group.unit for group in plan.groups for leaf in group.leaves}
    leaves = {path: replace(leaf, grid=grid) for path, leaf in plan.leaves.items()}
    groups = make_groups(leaves, owners, part, plan.batch.axes)
    return Plan(part, plan.batch, leaves, groups, plan.inits, plan.precision)
