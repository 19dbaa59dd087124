"""Parameter trees as trees of DTensors, and back.

A DTensor is cut along its dims, and a flat shard is a range of a buffer: ranks exchange the elements that the other
layout puts on another rank. Leaves that are cut equally in both layouts are copied locally.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.ranks import Ranks
from fshard.errors import TreeError, lines
from fshard.interchange.export_plan import exchange_pieces
from fshard.interchange.state_dicts import dotted
from fshard.interchange.torch_formats import Placements, joined_mesh, local_part, make_dtensor
from fshard.runtime.comm import collective_call, enter
from fshard.sharding.layout import Piece
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape, axes_of
from fshard.sharding.stage_table import refuse_stages


@collective_call
def to_dtensor(params: Mapping[str, Any], plan: Plan, *, device_mesh: Any = None) -> dict[str, Any]:
    """A tree of local tensors as a tree of DTensors. Collective.

    A leaf that a spec cuts along a dim is cut along the same dim. A flat-sharded leaf is cut along its first dim that
    no axis cuts, as in FSDP2, so ranks exchange its elements; a scalar is replicated.

    Args:
        params: a nested dict of local tensors, such as ``state.params``.
        plan: the plan.
        device_mesh: a ``DeviceMesh`` of the same axes, sizes and ranks; by default a new one with its own groups.

    Returns:
        A nested dict of DTensors that share no memory with ``params``.

    Raises:
        TreeError: ``params`` is not this rank's part of the plan's tree.
        PlanError: there are no processes, or ``device_mesh`` is another mesh.

    Example, under torchrun::

        tree = fs.io.to_dtensor(state.params, plan)
        net.load_state_dict(dict(fs.tree.paths(tree)), assign=True)
    """
    expect("to_dtensor(params, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    refuse_stages("to_dtensor(params, plan)", plan)
    flat = plan.check_tree(params, whole=False)
    theirs, mesh = joined_mesh(plan.mesh, device_mesh), plan.mesh
    enter(mesh, "to_dtensor")
    out: dict[str, Any] = {}
    for path, (group, number) in plan.places().items():
        leaf = plan.leaves[path]
        placements = _placements(leaf, mesh)
        have = [group.piece(number, mesh, rank) for rank in range(mesh.size)]
        want = [box_of(leaf.shape, placements, mesh, rank) for rank in range(mesh.size)]
        local = exchange_pieces(Ranks(mesh, mesh.axis_names), flat[path].detach().reshape(-1), have, want)
        out[path] = make_dtensor(local.view(want[mesh.rank].shape), theirs, placements, leaf.shape)
    return tree.nest({path: out[path] for path in plan.leaves})


@collective_call
def from_dtensor(params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A tree of DTensors as a tree of local tensors, such as ``state.params``. Collective.

    Ranks exchange the elements that the plan puts on another rank. A DTensor of partial sums, or with strided shards
    over two mesh dims, is gathered first, one leaf at a time.

    Args:
        params: a nested or flat dict of DTensors on a mesh of the plan's ranks and sizes. Plain tensors are whole
            leaves.
        plan: the plan.

    Returns:
        A nested dict of local tensors that share no memory with ``params``.

    Raises:
        TreeError: leaves are missing, unknown, of another shape or dtype, or lie on another mesh.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.io.from_dtensor({"w": w}, plan)  # a plain tensor stands for a DTensor
    {'w': tensor([1., 2., 3., 4.])}
    """
    wants: list[Want] = [
        ("params", params, Mapping, "a dict of tensors"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("from_dtensor(params, plan)", wants)
    refuse_stages("from_dtensor(params, plan)", plan)
    aliases = {alias for leaf in plan.leaves.values() for alias in leaf.aliases}
    given = plan.check_tree(tree.nest({k: v for k, v in dotted(params) if k not in aliases}), whole=True)
    pairs = [(value.dtype, plan.leaves[path].dtype, path) for path, value in given.items()]
    if wrong := [f"{path}: {have}, the plan has {want}" for have, want, path in pairs if have != want]:
        raise TreeError(lines("params has other dtypes than the plan:", wrong, "Cast the leaves first."))
    mesh = plan.mesh
    enter(mesh, "from_dtensor")
    out: dict[str, Any] = {}
    for path, (group, number) in plan.places().items():
        leaf, value = plan.leaves[path], given[path]
        local, placements = local_part(value, path, mesh)
        have = [box_of(leaf.shape, placements, mesh, rank) for rank in range(mesh.size)]
        want = [group.piece(number, mesh, rank) for rank in range(mesh.size)]
        flat = local.to(device=mesh.device, dtype=leaf.dtype).reshape(-1)
        part = exchange_pieces(Ranks(mesh, mesh.axis_names), flat, have, want)
        out[path] = part.view(group.local_shape(number, mesh))
    return tree.nest({path: out[path] for path in plan.leaves})


def box_of(shape: Shape, placements: Placements, mesh: Mesh, rank: int) -> Piece:
    """A rank's part of a DTensor: chunks as ``torch.chunk`` cuts them, one mesh dim after the other."""
    offset, local = [0] * len(shape), list(shape)
    for dim, size, place in zip(placements, mesh.sizes, mesh.coords(rank), strict=True):
        if dim is not None:
            width = -(-local[dim] // size)
            begin = min(place * width, local[dim])
            offset[dim] += begin
            local[dim] = min(width, local[dim] - begin)
    return Piece(tuple(offset), tuple(local), 0, torch.Size(local).numel())


def _placements(leaf: Leaf, mesh: Mesh) -> Placements:
    """The tensor dim that each axis of the mesh divides."""
    dims = {axis: dim for dim, entry in enumerate(leaf.at_rest.dims) for axis in axes_of(entry)}
    free = next((dim for dim in range(len(leaf.shape)) if dim not in dims.values()), 0)
    if leaf.shape:
        dims |= {axis: free for axis in axes_of(leaf.at_rest.flat)}
    return tuple(dims.get(axis) for axis in mesh.axis_names)
