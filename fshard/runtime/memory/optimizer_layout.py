"""The layout of an optimizer's buffers beside a shard, and the slices of the shard that one kernel call can update."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.optim.contract import Contract
from fshard.optim.form import Form
from fshard.sharding.layout import ALIGN, Group
from fshard.sharding.low_rank import bases, rank_of
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

MASTER = "master"
"""The buffer of the exact values of what a rank updates, where all ranks hold rounded ones."""


RESIDUAL = "residual"
"""The buffer of what rounding has left out of this rank's part of sums over replicas. Each replica has another."""

BASIS = "basis"
"""The buffer of the second factors of products of low rank. Replicas have equal ones, and each shard others."""

KEPT = (MASTER, RESIDUAL, BASIS)
"""The buffers beside a shard that are none of its optimizer's."""


class UpdateSlice(NamedTuple):
    """A range of a shard, in elements, that one kernel call can update.

    Attributes:
        begin: its first element in the shard.
        end: the end of its elements.
        hyper: the hyper-parameters that its leaves share, from the optimizer.
        leaves: the numbers of its first and last leaf on this rank.
        limit: the clipping rule of its leaves.
        late: the number of updates before its leaves began to train.
    """

    begin: int
    end: int
    hyper: Hashable
    leaves: tuple[int, int]
    limit: int = 0
    late: int = 0


@dataclass(frozen=True)
class BufferLayout:
    """The layout of one of an optimizer's buffers.

    Attributes:
        length: its elements.
        dtype: their dtype.
        forms: the form of each leaf's state, by the leaf's number in the group; leaves may be missing.
        ranges: the range of each leaf's state in the buffer, by the leaf's number.
        plain: whether the ranges are those of the leaves in the shard of parameters.
    """

    length: int
    dtype: torch.dtype
    forms: Mapping[int, Form]
    ranges: Mapping[int, tuple[int, int]]
    plain: bool

    def part(self, piece: UpdateSlice) -> tuple[int, int] | None:
        """The range of the buffer that belongs to an update slice; None if its leaves have no such state."""
        first, last = piece.leaves
        return (self.ranges[first][0], self.ranges[last][1]) if first in self.ranges else None


def optimizer_layout(group: Group, mesh: Mesh, opt: Contract, part: int | None = None) -> dict[str, BufferLayout]:
    """The layouts of an optimizer's buffers beside one group's shard. Adjacent leaves with equal forms stay adjacent.

    Args:
        opt: the optimizer.
        part: the number of the shard; None for this rank's.
    """
    part = mesh.index(group.gather_axes) if part is None else part
    spans = [group.shard_range(number, part) for number in range(len(group.leaves))]
    found: dict[str, dict[int, Form]] = {}
    for number, leaf in enumerate(group.leaves):
        for name, form in opt.forms(opt.hyper(leaf.path, leaf.shape)).items():
            found.setdefault(name, {})[number] = form
    return {name: _buffer_layout(group, spans, forms) for name, forms in found.items()}


def shard_layouts(group: Group, mesh: Mesh, opt: Contract) -> dict[str, BufferLayout]:
    """The layouts of all buffers beside what this rank updates of a group: the optimizer's, and those in ``KEPT``."""
    owned, made = group.owned, optimizer_layout(group.owned, mesh, opt)
    forms = {MASTER: Form()} if "update_gather" in group.wires else {}
    forms |= {RESIDUAL: Form(wide=True)} if group.feedback else {}
    made |= {BASIS: _basis_layout(owned, rank)} if (rank := rank_of(group)) else {}
    if not forms:
        return made
    spans = [owned.shard_range(number, mesh.index(owned.gather_axes)) for number in range(len(owned.leaves))]
    every = range(len(spans))
    return made | {name: _buffer_layout(owned, spans, dict.fromkeys(every, form)) for name, form in forms.items()}


def most_bytes(group: Group, mesh: Mesh, opt: Contract) -> int:
    """Bytes of an optimizer's buffers beside one group's shard, on the rank with most: the same on every rank."""
    own = optimizer_layout(group, mesh, opt)
    plain = all(layout.plain for layout in own.values())
    every = [own] if plain else [optimizer_layout(group, mesh, opt, part) for part in range(group.parts)]
    return max(sum(layout.length * layout.dtype.itemsize for layout in one.values()) for one in every)


def shard_bytes(group: Group) -> int:
    """Bytes of a group's shard of the parameters."""
    numel, dtype = group.kept
    return numel * dtype.itemsize


def beside_bytes(group: Group, mesh: Mesh, opt: Contract) -> int:
    """Bytes of all buffers beside one group's shard, on the rank with most: the optimizer's, and those in ``KEPT``."""
    if not group.trainable:
        return 0
    exact = group.dtype.itemsize if "update_gather" in group.wires else 0
    left = sum(length for _, length in left_by_sums(group)) * group.residual_dtype.itemsize
    return most_bytes(group.owned, mesh, opt) + group.owned.chunk * exact + left


def left_by_sums(group: Group) -> list[tuple[str, int]]:
    """Return what a sum over a group's replicas leaves for the next one: the names of buffers, and their elements."""
    found = [(RESIDUAL, group.owned.chunk)] if group.feedback else []
    return found + ([(BASIS, _basis_layout(group.owned, rank).length)] if (rank := rank_of(group)) else [])


def _basis_layout(group: Group, rank: int) -> BufferLayout:
    """The layout of the second factors of a group's products: those of all leaves, also where none of one is held."""
    found = bases(group, rank)
    forms = {number: Form(shape, group.residual_dtype) for number, (_, shape) in found.items()}
    ranges = {number: (at, at + cols * rank) for number, (at, (cols, _)) in found.items()}
    end = max((end for _, end in ranges.values()), default=0)
    return BufferLayout(end, group.residual_dtype, forms, ranges, False)


def _buffer_layout(group: Group, spans: list[tuple[int, int]], forms: dict[int, Form]) -> BufferLayout:
    """The layout of one buffer."""
    dtypes = {form.typed(group.dtype) for form in forms.values()}
    assert len(dtypes) == 1, "a buffer has one dtype"
    if len(forms) == len(spans) and all(form.shape is None and form.block == 1 for form in forms.values()):
        return BufferLayout(group.chunk, dtypes.pop(), forms, dict(enumerate(spans)), True)
    ranges: dict[int, tuple[int, int]] = {}
    # A run of leaves keeps its gaps, so that its update slices are ranges here too.
    end, before, shift, offset = 0, -1, 0, 0
    for number, form in forms.items():
        begin, stop = spans[number]
        if begin == stop:
            ranges[number] = (0, 0)
            continue
        apart = before < 0 or form.shape is not None or forms[before] != form
        apart = apart or any(n not in forms for n in range(before, number))
        if apart or (begin - shift) % form.block:
            shift = begin
            offset = end = -(-end // ALIGN) * ALIGN
        at = offset + (begin - shift) // form.block
        end = at + form.count(stop - begin)
        ranges[number] = (at, end)
        before = number
    return BufferLayout(end, dtypes.pop(), forms, ranges, False)


def merge_slices(
    group: Group,
    mesh: Mesh,
    hyper: Callable[[str, tuple[int, ...]], Hashable],
    step: Callable[[Any], int | None] = lambda hyper: 1,
    limit: Callable[[str], int] = lambda path: 0,
    late: Mapping[str, int] = MappingProxyType({}),
) -> tuple[UpdateSlice, ...]:
    """The update slices of this rank's shard: adjacent leaves with equal hyper-parameters are merged.

    Padding between merged leaves is updated with them: it holds zeros, gets zero gradients and stays zero.

    Args:
        hyper: from a leaf's path and shape, a value that merged leaves share.
        step: from the value of ``hyper``, the number that divides the distance of merged leaves; None for no merging.
        limit: from a leaf's path, the number of its clipping rule, which merged leaves share.
        late: the updates before a leaf began to train, by path, which merged leaves share; none by default.
    """
    part = mesh.index(group.gather_axes)
    out: list[UpdateSlice] = []
    for number, leaf in enumerate(group.leaves):
        begin, end = group.shard_range(number, part)
        value = hyper(leaf.path, leaf.shape)
        if begin == end:
            continue
        apart, rule, missed = step(value), limit(leaf.path), late.get(leaf.path, 0)
        alike = bool(out) and (out[-1].hyper, out[-1].limit, out[-1].late) == (value, rule, missed)
        if alike and apart is not None and (begin - out[-1].begin) % apart == 0:
            out[-1] = out[-1]._replace(end=end, leaves=(out[-1].leaves[0], number))
        else:
            out.append(UpdateSlice(begin, end, value, (number, number), rule, missed))
    return tuple(out)


def group_slices(
    group: Group,
    mesh: Mesh,
    opt: Contract,
    limit: Callable[[str], int] = lambda path: 0,
    late: Mapping[str, int] = MappingProxyType({}),
) -> tuple[UpdateSlice, ...]:
    """The update slices of one group."""

    def step(hyper: Any) -> int | None:
        grain = opt.grain(hyper)
        own = any(form.shape is not None for form in opt.forms(hyper).values())
        return None if own or not isinstance(grain, int) else grain

    return merge_slices(group, mesh, opt.hyper, step, limit, late)


def update_slices(
    plan: Plan,
    opt: Contract,
    limit: Callable[[str], int] = lambda path: 0,
    late: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, tuple[UpdateSlice, ...]]:
    """The update slices of each trained group, by its id."""
    trained = [group for group in plan.groups if group.trainable]
    return {group.id: group_slices(group.owned, plan.mesh, opt, limit, late) for group in trained}


def start_buffers(
    group: Group, mesh: Mesh, opt: Contract, param: Tensor
) -> tuple[dict[str, Tensor], dict[str, BufferLayout]]:
    """An optimizer's buffers for a shard before the first update, and their layouts."""
    layouts = optimizer_layout(group, mesh, opt)
    if opt.uniform:
        return dict(opt.init(param, None)), layouts
    buffers = {name: torch.zeros(h.length, dtype=h.dtype, device=param.device) for name, h in layouts.items()}
    for piece in group_slices(group, mesh, opt):
        for name, value in opt.init(param[piece.begin : piece.end], piece.hyper).items():
            span = layouts[name].part(piece)
            assert span is not None, name
            buffers[name][span[0] : span[1]] = value.reshape(-1)
    return buffers, layouts
