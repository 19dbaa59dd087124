"""Norms of gradient shards."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import foreach_norm

SHORT = frozenset((torch.float16, torch.bfloat16))
DTYPE = operator.attrgetter("dtype")


def norms_of(shards: list[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor, in float32 at least: one kernel for all, or two where some are short.

    In a 16-bit dtype a norm would lose digits, or overflow although no element does.
    """
    if SHORT.isdisjoint(map(DTYPE, shards)):
        return foreach_norm(shards)
    if SHORT.issuperset(map(DTYPE, shards)):
        return foreach_norm(shards, 2, torch.float32)
    narrow = iter(norms_of([shard for shard in shards if shard.dtype in SHORT]))
    wide = iter(norms_of([shard for shard in shards if shard.dtype not in SHORT]))
    return [next(narrow if shard.dtype in SHORT else wide) for shard in shards]


def share_of(group: Group, mesh: Mesh) -> float:
    """The factor for sums over a group's elements on this rank, so that over all ranks each element counts once."""
    return mesh.axis_size(group.owned.gather_axes + group.leaves[0].compute.axes) / mesh.size / group.holders
