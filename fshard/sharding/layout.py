"""Layout: leaves to groups, groups to flat buffers, buffers to ranks.

A group's gathered buffer IS the concatenation of its full leaves, so an all-gather needs no copy on either side
(veScale-FSDP's ragged shards, FSDP1's flat parameter). Leaves start at multiples of ``ALIGN`` elements; the end is
padded until every rank has an equal chunk. With ``align="leaf"`` no leaf is cut: whole leaves are packed into the
chunks, which costs more padding. Leaves that a positional spec cuts along a tensor dim form groups of ``kind="dim"``:
their buffers hold rank-major pieces while they travel, and one copy a leaf packs or unpacks them.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fshard.sharding.kinds import Kinds
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.spec import P, Shape, axes_of
from fshard.sharding.wire import WireFormat, wire_formats

ALIGN = 16
"""Elements between the possible starts of two leaves: 64 bytes in float32, 32 in bfloat16."""


@dataclass(frozen=True)
class Piece:
    """One rank's part of a leaf: elements ``start`` to ``stop``, in row-major order, of a box in the whole leaf."""

    offset: Shape
    shape: Shape
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements held."""
        return self.stop - self.start


@dataclass(frozen=True)
class Group:
    """Leaves of one unit with equal rules: one flat buffer, the grain of communication.

    Attributes:
        name: the unit's name, with ``/1``, ``/2``... for its further groups.
        unit: the unit that owns the leaves, or ``root``.
        leaves: in the order of the buffer.
        starts: where each leaf begins in the full buffer, in elements.
        kind: ``flat`` (the buffer is cut into equal ranges) or ``dim`` (each leaf is cut along one of its dims).
        gather_axes: parameters are gathered over these for compute, gradients scattered over them after backward.
        sum_axes: the data axes that hold replicas: gradients are all-reduced over them.
        parts: the number of chunks, the size of ``gather_axes``.
        chunk: elements of one rank's shard.
        opt_axes: those of ``sum_axes`` that cut the shard further for the optimizer: each rank updates a part of it,
            and receives the other parts after the update.
        opt_parts: the number of these parts, the size of ``opt_axes``.
        holders: in a pipeline, how many positions on the axis of stages hold the leaves.
    """

    id: int
    name: str
    unit: str
    leaves: tuple[Leaf, ...]
    starts: tuple[int, ...]
    kind: str
    gather_axes: Axes
    sum_axes: Axes
    parts: int
    chunk: int
    opt_axes: Axes = ()
    opt_parts: int = 1
    holders: int = 1

    @functools.cached_property
    def owned(self) -> "Group":
        """The group as the optimizer sees it: a chunk is a rank's ``own_range`` of the shard."""
        if self.opt_parts == 1:
            return self
        return replace(
            self,
            leaves=tuple(replace(leaf, at_rest=leaf.opt or leaf.at_rest, opt=None) for leaf in self.leaves),
            gather_axes=(*self.gather_axes, *self.opt_axes),
            sum_axes=self.rest_axes,
            parts=self.parts * self.opt_parts,
            chunk=self.chunk // self.opt_parts,
            opt_axes=(),
            opt_parts=1,
        )

    def own_range(self, mesh: Mesh) -> tuple[int, int]:
        """The elements of its shard that this rank updates."""
        width, at = self.chunk // self.opt_parts, mesh.index(self.opt_axes)
        return at * width, (at + 1) * width

    @functools.cached_property
    def kinds(self) -> Kinds:
        """The memory spaces of the leaves, and the side of their update."""
        return self.leaves[0].kinds

    @functools.cached_property
    def gathered(self) -> bool:
        """Tell whether units read a gathered copy, and not the shard itself."""
        return self.travels or self.packed is not None

    @functools.cached_property
    def travels(self) -> bool:
        """Tell whether a gather moves its shard, between ranks or from the host: others unpack it where it lies."""
        return self.parts > 1 or self.kinds.hosted

    @functools.cached_property
    def packed(self) -> WireFormat | None:
        """The format in which the shard is kept; None for the dtype of the parameters."""
        return self.leaves[0].packed

    @functools.cached_property
    def kept(self) -> tuple[int, torch.dtype]:
        """The elements and the dtype of the shard as it is kept."""
        return (self.chunk, self.dtype) if self.packed is None else (self.packed.nbytes(self.chunk), torch.uint8)

    @functools.cached_property
    def offloaded(self) -> bool:
        """Tell whether gradients go to the host, where the update runs."""
        return self.trainable and self.kinds.update == "host"

    @functools.cached_property
    def update_staged(self) -> bool:
        """Tell whether parameters or state are staged on the side of the update."""
        return self.trainable and any(self.kinds.moved)

    @property
    def scatter_axes(self) -> Axes:
        """The axes of the reduce-scatter after each backward: the gather's axes, or else the optimizer's."""
        return self.gather_axes if self.parts > 1 else self.opt_axes

    @property
    def scatter_parts(self) -> int:
        """The number of parts of that reduce-scatter."""
        return self.parts if self.parts > 1 else self.opt_parts

    @property
    def scatter_chunk(self) -> int:
        """The elements of one part."""
        return self.numel // self.scatter_parts

    @property
    def second_scatter(self) -> bool:
        """Tell whether a step's complete gradients are scattered once more, over ``opt_axes``."""
        return self.parts > 1 and self.opt_parts > 1

    @property
    def rest_axes(self) -> Axes:
        """The data axes that hold replicas of the part that a rank updates."""
        return tuple(axis for axis in self.sum_axes if axis not in self.opt_axes)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, which all leaves share."""
        return self.leaves[0].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gather and of compute."""
        return self.leaves[0].precision.computes_in(self.dtype)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the flat gradient, which is rounded only if it is scattered over ranks."""
        exact = self.scatter_parts == 1 or "reduce_scatter" in self.wires
        return self.dtype if exact else self.leaves[0].precision.reduces_in(self.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the sum of gradient shards over replicas."""
        exact = "replica_reduce" in self.wires
        return self.dtype if exact else self.leaves[0].precision.reduces_in(self.dtype)

    @functools.cached_property
    def wires(self) -> Mapping[str, WireFormat]:
        """The formats of its compressed transfers, by kind."""
        summed = self.sum_axes if self.second_scatter else self.rest_axes
        axes = {"all_gather": self.gather_axes, "reduce_scatter": self.scatter_axes, "replica_reduce": summed}
        axes["update_gather"] = self.opt_axes
        found = wire_formats(self.leaves[0].wire, axes, self.dtype)
        gather = WireFormat("fp8_e4m3", self.row) if self.row else self.packed
        return found if gather is None else {**found, "all_gather": gather}

    @functools.cached_property
    def row(self) -> int:
        """The elements of each row, if it travels and is read in float8, with one scale a row; 0 if it is not."""
        row, own = self.leaves[0].row, self.chunk // self.opt_parts
        whole = row and self.kind == "flat" and self.parts > 1 and not any(n % row for n in (own, *self.starts))
        return row if whole and all(leaf.row == row for leaf in self.leaves) else 0

    @functools.cached_property
    def feedback(self) -> bool:
        """Tell whether what rounding leaves out of its sums over replicas is kept."""
        form = self.wires.get("replica_reduce")
        return self.trainable and form is not None and form.feedback

    @property
    def residual_dtype(self) -> torch.dtype:
        """The dtype of what is left out: float32 at least."""
        return self.dtype if self.dtype.itemsize > 4 else torch.float32

    @functools.cached_property
    def resident_cast(self) -> tuple[int, torch.dtype] | None:
        """The elements and dtype of the copy of the shard that is gathered or read; None for the shard itself.

        What travels in a wire format is kept packed. A shard that is not gathered is rounded to what would arrive.
        """
        if self.packed is not None:
            return None
        form = self.wires.get("all_gather")
        if form is not None and self.gathered:
            return form.nbytes(self.chunk), torch.uint8
        return None if form is None and self.compute_dtype == self.dtype else (self.chunk, self.compute_dtype)

    @functools.cached_property
    def trainable(self) -> bool:
        """Tell whether a leaf gets gradients. All do, or none, unless ``plan.only`` has frozen some."""
        return any(leaf.trainable for leaf in self.leaves)

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.parts * self.chunk

    @property
    def staged(self) -> bool:
        """Tell whether gathered data arrive in another order than units read them, and pass a staging buffer."""
        return self.kind == "dim" and self.parts > 1

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: ranges of the full buffer without a leaf."""
        ends = [0, *(start + leaf.numel for start, leaf in zip(self.starts, self.leaves, strict=True))]
        begins = [*self.starts, self.numel]
        return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)

    def shard_range(self, number: int, part: int) -> tuple[int, int]:
        """The range of a part's shard that holds the leaf: ``(begin, end)`` in elements, maybe empty."""
        start, leaf = self.starts[number], self.leaves[number]
        if self.kind == "dim":
            return start // self.parts, start // self.parts + leaf.numel // self.parts
        low = part * self.chunk
        begin, end = max(start, low), min(start + leaf.numel, low + self.chunk)
        return (begin - low, end - low) if begin < end else (0, 0)

    def piece(self, number: int, mesh: Mesh, rank: int | None = None) -> Piece:
        """The part of the leaf with this number that a rank holds, by default the mesh's own."""
        leaf = self.leaves[number]
        flat = self.kind == "flat"
        offset, shape = box(leaf.shape, leaf.compute if flat else leaf.at_rest, mesh, rank)
        if not flat:
            return Piece(offset, shape, 0, math.prod(shape))
        part = mesh.index(self.gather_axes, rank)
        begin, end = self.shard_range(number, part)
        first = part * self.chunk - self.starts[number] + begin if end > begin else 0
        return Piece(offset, shape, first, first + end - begin)

    def local_shape(self, number: int, mesh: Mesh) -> Shape:
        """The shape of this rank's tensor of a leaf: 1-D if it is flat-sharded, else the box that it holds."""
        piece = self.piece(number, mesh)
        return (piece.numel,) if self.leaves[number].at_rest.flat is not None else piece.shape


def box(shape: Shape, spec: P, mesh: Mesh, rank: int | None = None) -> tuple[Shape, Shape]:
    """The offset and shape of a rank's part of a leaf under a spec's positional entries."""
    offset, local = [0] * len(shape), list(shape)
    for dim, entry in enumerate(spec.dims):
        axes = axes_of(entry)
        if axes:
            local[dim] = shape[dim] // mesh.axis_size(axes)
            offset[dim] = local[dim] * mesh.index(axes, rank)
    return tuple(offset), tuple(local)


def global_index(shape: tuple[int, ...], piece: Piece, device: torch.device) -> Tensor:
    """The row-major index in the whole leaf of each element of a piece, int64."""
    index = torch.arange(piece.start, piece.stop, device=device)
    if piece.shape == shape:
        return index
    out = torch.zeros_like(index)
    stride = 1
    for dim in reversed(range(len(shape))):
        out += (index % piece.shape[dim] + piece.offset[dim]) * stride
        index = index // piece.shape[dim]
        stride *= shape[dim]
    return out


def make_groups(
    leaves: dict[str, Leaf],
    owners: dict[str, str],
    mesh: Mesh,
    data_axes: Axes,
    apart: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Group, ...]:
    """The groups of a plan, units in the order of their first leaf. Leaves that differ in ``apart`` share no group.

    In a group, matrices come first: an optimizer that decays only these then needs at most two kernel calls a group.
    """
    by_key: dict[tuple[str, object], list[Leaf]] = {}
    for path, leaf in leaves.items():
        kind = "flat" if leaf.gather_dim is None else "dim"
        key = (
            *(leaf.gather_axes, kind, leaf.compute.axes, leaf.dtype, leaf.trainable),
            *(leaf.precision, leaf.align, leaf.opt_axes, leaf.kinds, leaf.wire, leaf.packed, apart.get(path)),
            leaf.row if mesh.axis_size(leaf.gather_axes) > 1 else 0,
        )
        by_key.setdefault((owners[path], key), []).append(leaf)
    groups, count, loads = list[Group](), dict[str, int](), dict[Axes, list[int]]()
    taken = {unit for unit, _ in by_key}
    for (unit, _), members in by_key.items():
        number = count[unit] = count.get(unit, -1) + 1
        while number and f"{unit}/{number}" in taken:  # a unit may have that name
            number = count[unit] = number + 1
        name = f"{unit}/{number}" if number else unit
        spread = (*members[0].gather_axes, *members[0].opt_axes)
        load = loads.setdefault(spread, [0] * mesh.axis_size(spread))
        groups.append(_group(len(groups), name, unit, members, mesh, data_axes, load))
    return tuple(groups)


def _group(
    number: int, name: str, unit: str, members: list[Leaf], mesh: Mesh, data_axes: Axes, load: list[int]
) -> Group:
    first = members[0]
    parts, opt_parts = mesh.axis_size(first.gather_axes), mesh.axis_size(first.opt_axes)
    kind = "flat" if first.gather_dim is None else "dim"
    packed = first.packed.block if first.packed is not None else 1
    row = first.row if parts > 1 else 0
    grid = math.lcm(
        *(ALIGN, first.wire.grid, packed, first.grid, row or 1), first.align if isinstance(first.align, int) else 1
    )
    packs = bins(members, load, ALIGN) if first.align == "leaf" else [members]
    ordered, starts, ends = [], [], []
    for chunk_number, leaves in enumerate(packs):
        end = 0
        for leaf in sorted(leaves, key=lambda leaf: len(leaf.shape) < 2):  # matrices first
            ordered.append(leaf)
            starts.append((chunk_number, end))
            end = _up(end + leaf.numel, grid * (parts if kind == "dim" else 1))
        ends.append(end)
    own = _up(-(-max(ends) // (parts * opt_parts if len(packs) == 1 else 1)), grid)
    return Group(
        id=number,
        name=name,
        unit=unit,
        leaves=tuple(ordered),
        starts=tuple(chunk_number * own + start for chunk_number, start in starts),
        kind=kind,
        gather_axes=first.gather_axes,
        sum_axes=tuple(a for a in data_axes if a not in first.gather_axes and a not in first.compute.axes),
        parts=parts,
        chunk=own * opt_parts,
        opt_axes=first.opt_axes,
        opt_parts=opt_parts,
    )


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bins(leaves: list[Leaf], load: list[int], align: int) -> list[list[Leaf]]:
    """Whole leaves for each chunk, by size.

    Largest first, each leaf goes to the chunk that holds least (Graham, "Bounds on multiprocessing timing anomalies",
    1969: at most 4/3 of the optimum). The fullest chunk goes to the part with the smallest ``load`` of earlier groups;
    ``load`` is updated in place. So all parts update about equally much. Leaves begin at multiples of ``align``.
    """
    found: list[list[Leaf]] = [[] for _ in load]
    held = [0] * len(load)
    for leaf in sorted(leaves, key=lambda leaf: -leaf.numel):
        least = held.index(min(held))
        found[least].append(leaf)
        held[least] += -(-leaf.numel // align) * align
    place = {leaf.path: number for number, leaf in enumerate(leaves)}
    fullest_first = sorted(range(len(load)), key=lambda n: -held[n])
    out: list[list[Leaf]] = [[] for _ in load]
    for part, number in zip(sorted(range(len(load)), key=lambda n: load[n]), fullest_first, strict=True):
        out[part] = sorted(found[number], key=lambda leaf: place[leaf.path])
        load[part] += held[number]
    return out
