"""Shards as they are kept: in the dtype of the parameters, or packed, where leaves are frozen (``Rule.packed``)."""

import torch
from torch import Tensor

from fshard.runtime.comm.packing import pack, unpack
from fshard.runtime.memory.memory_spaces import memory_space
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh


def keep(group: Group, mesh: Mesh, values: Tensor) -> Tensor:
    """The shard that holds these values of a group's chunk: the values themselves, or in memory of its own packed."""
    if group.packed is None:
        return values
    return pack(values, group.packed, memory_space(group.kinds.param, mesh).empty(*group.kept))


def values_of(group: Group, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a group's chunk: the shard itself, or what it holds, unpacked, by default to the leaves' dtype."""
    if group.packed is None or shard.dtype != torch.uint8:
        return shard
    values = shard.new_empty(group.chunk, dtype=dtype or group.dtype)
    unpack(shard, group.packed, values)
    return values


def packed_parts(group: Group, shard: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a range of a packed shard that begins with a block, and ends with one or a leaf."""
    form = group.packed
    assert form is not None
    end = -(-end // form.block) * form.block
    scales = shard[form.payload(group.chunk) :].view(torch.float32)
    return shard[form.payload(begin) : form.payload(end)], scales[begin // form.block : end // form.block]
