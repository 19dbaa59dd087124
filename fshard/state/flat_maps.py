"""Leaves to flat buffers and back, as linear maps that autograd sees; whole leaves of all stages of a pipeline.

There are three forms of a group's leaves. *Pieces* are what one rank holds of each; they make up its chunk of the
buffer. *Compute leaves* are what units read, after the gather; they make up the full buffer, rank-major where the group
is cut along tensor dims. *Whole leaves* are the model's. Each map here has its inverse beside it.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fshard.collectives.linear import Collect, LinearCut, apply
from fshard.collectives.ranks import Ranks
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of
from fshard.sharding.stage_table import StageTable


def join_pieces(group: Group, mesh: Mesh, pieces: Sequence[Tensor]) -> Tensor:
    """This rank's pieces of all leaves as its chunk, ``(chunk,)``; zeros where no leaf lies."""
    part = mesh.index(group.gather_axes)
    ranges = [group.shard_range(number, part) for number in range(len(group.leaves))]
    return _spread(ranges, [piece.reshape(-1) for piece in pieces], group.chunk)


def cut_pieces(group: Group, mesh: Mesh, chunk: Tensor) -> list[Tensor]:
    """The inverse of ``join_pieces``: views of the chunk."""
    part = mesh.index(group.gather_axes)
    ranges = [group.shard_range(number, part) for number in range(len(group.leaves))]
    return [chunk[a:b].view(group.local_shape(number, mesh)) for number, (a, b) in enumerate(ranges)]


def join_leaves(group: Group, leaves: Sequence[Tensor]) -> Tensor:
    """Compute leaves as the full buffer, ``(parts * chunk,)``: chunks by rank."""
    if not group.staged:
        ranges = [(a, a + leaf.numel) for a, leaf in zip(group.starts, group.leaves, strict=True)]
        return _spread(ranges, [leaf.reshape(-1) for leaf in leaves], group.numel)
    rows = [_by_rank(group, leaf, tensor) for leaf, tensor in zip(group.leaves, leaves, strict=True)]
    ranges = [group.shard_range(number, 0) for number in range(len(group.leaves))]
    return _spread(ranges, rows, group.chunk).reshape(-1)


def cut_leaves(group: Group, full: Tensor) -> list[Tensor]:
    """The inverse of ``join_leaves``: views where the layout allows it."""
    if not group.staged:
        spans = zip(group.starts, group.leaves, strict=True)
        return [full[a : a + leaf.numel].view(leaf.compute_shape) for a, leaf in spans]
    rows, out = full.view(group.parts, group.chunk), []
    for number, leaf in enumerate(group.leaves):
        begin, end = group.shard_range(number, 0)
        dim, local = leaf.gather_dim or 0, list(leaf.compute_shape)
        local[dim] //= group.parts
        out.append(rows[:, begin:end].reshape(group.parts, *local).movedim(0, dim).reshape(leaf.compute_shape))
    return out


def widen(leaf: Leaf, mesh: Mesh, tensor: Tensor) -> Tensor:
    """A compute leaf to the whole leaf: gathered over the axes on which compute leaves it cut."""
    for dim, entry in enumerate(leaf.compute.dims):
        if mesh.axis_size(axes_of(entry)) > 1:
            tensor = apply(tensor, Collect(Ranks(mesh, axes_of(entry)), dim - len(leaf.shape)))
    return tensor


def narrow(leaf: Leaf, mesh: Mesh, tensor: Tensor) -> Tensor:
    """A whole leaf to this rank's compute leaf: the adjoint and the inverse of ``widen``."""
    for dim, entry in enumerate(leaf.compute.dims):
        if mesh.axis_size(axes_of(entry)) > 1:
            tensor = apply(tensor, LinearCut(Ranks(mesh, axes_of(entry)), dim - len(leaf.shape)))
    return tensor


def _by_rank(group: Group, leaf: Leaf, tensor: Tensor) -> Tensor:
    """Return what each rank holds of a compute leaf that is cut along a dim, ``(parts, n)``."""
    dim, shape = leaf.gather_dim or 0, leaf.compute_shape
    split = tensor.reshape(*shape[:dim], group.parts, shape[dim] // group.parts, *shape[dim + 1 :])
    return split.movedim(dim, 0).reshape(group.parts, math.prod(shape) // group.parts)


def _spread(ranges: Sequence[tuple[int, int]], parts: Sequence[Tensor], length: int) -> Tensor:
    """Parts at their ranges along the last dim, in order, with zeros between them."""
    # Two dims, and empty parts, too: a rank that holds nothing of a group must take part in the collectives of its
    # derivatives, and the second derivative of torch.cat leaves 1-D empty tensors out.
    rows = [part.reshape(parts[0].shape[:-1].numel(), part.shape[-1]) for part in parts]
    out, at, zeros = [], 0, rows[0].new_zeros
    for (begin, end), row in zip(ranges, rows, strict=True):
        if end > begin > at:
            out.append(zeros((row.shape[0], begin - at)))
        out.append(row)
        at = end if end > begin else at  # an empty leaf begins where it likes
    if at < length:
        out.append(zeros((rows[0].shape[0], length - at)))
    return torch.cat(out, -1).view(*parts[0].shape[:-1], length)


def of_all_stages(own: Mapping[str, Tensor], plan: Plan, stages: StageTable) -> dict[str, Tensor]:
    """The whole tensors of all stages, given those of this rank's. Collective along the axis of stages."""
    out: dict[str, Tensor] = {}
    ranks, frozen = Ranks(plan.mesh, (stages.axis,)), {path for path, leaf in plan.leaves.items() if not leaf.trainable}
    # A tree of optimizer state has no frozen leaves, which ranks without any cannot see.
    given = torch.tensor([not frozen.isdisjoint(own)], device=plan.mesh.device)
    all_leaves = not frozen or bool(apply(given, Collect(ranks, -1)).any())
    for path, leaf in plan.leaves.items():
        if not all_leaves and path in frozen:
            continue
        mine = own.get(path)
        row = torch.zeros(leaf.shape, dtype=leaf.dtype, device=plan.mesh.device) if mine is None else mine
        rows = apply(row.reshape(-1), Collect(ranks, -1))
        out[path] = rows.view(-1, row.numel())[stages.positions(path)[0]].view(leaf.shape).clone()
    return out
