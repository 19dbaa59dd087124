"""Trees of shards as the chunks that schedules gather from, without copies where leaves are views of their chunks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.memory.memory_spaces import memory_space
from fshard.runtime.memory.slots import storage_of
from fshard.sharding.layout import Group
from fshard.state.elementwise import unguarded
from fshard.state.flat import FlatForm, alike, known_flat

Placed = tuple[int, int, Tensor]
"""The range of a leaf in the chunk of its group, and the leaf."""


def chunks_of(given: Any, form: FlatForm) -> Mapping[int, Tensor]:
    """The chunk of each group, to be read: a view of the memory of its leaves where these lie as they do in it.

    Elements of no leaf may have any value.
    """
    flat = known_flat(given)
    if flat is not None and (flat.form is form or alike(flat.form, form)):
        return flat.chunks
    placed: dict[int, list[Placed]] = {group.id: [] for group in form.groups}
    for leaf, (group, begin, end, _) in zip(form.read(given), form.places, strict=True):
        if end > begin:
            placed[group].append((begin, end, leaf))
    with torch.no_grad(), unguarded():
        return {group.id: _chunk(group, placed[group.id], form) for group in form.groups}


def _chunk(group: Group, leaves: Sequence[Placed], form: FlatForm) -> Tensor:
    """The chunk of a group: where its leaves lie, or a copy of them."""
    if (
        leaves
        and not group.kinds.hosted
        and all(leaf.is_contiguous() and leaf.dtype == group.dtype for _, _, leaf in leaves)
    ):
        begin, _, first = leaves[0]
        storage, start = first.untyped_storage(), first.storage_offset() - begin
        alike = all(
            storage_of(leaf) == storage_of(first) and leaf.storage_offset() - at == start for at, _, leaf in leaves
        )
        if alike and start >= 0 and (start + group.chunk) * group.dtype.itemsize <= storage.nbytes():
            return first.detach().as_strided((group.chunk,), (1,), start)
    made = memory_space(group.kinds.param, form.plan.mesh).zeros(group.chunk, group.dtype)
    for begin, end, leaf in leaves:
        made[begin:end] = leaf.detach().reshape(-1)
    return made
