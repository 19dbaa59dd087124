"""Layout: leaves to groups, groups to flat buffers, buffers to ranks.

A group's gathered buffer IS the concatenation of its full leaves, so an all-gather needs no copy on either side
(veScale-FSDP's ragged shards, FSDP1's flat parameter). Leaves start at multiples of ``ALIGN`` elements; the end is
padded until every rank has an equal chunk. With ``align="leaf"`` no leaf is cut: whole ones are packed into the
chunks, which costs more padding. Leaves that a positional spec cuts along a tensor dim cannot be concatenated that way:
their groups have ``kind="dim"``, hold rank-major pieces while they travel, and are packed and unpacked by one copy a
leaf.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch

from fshard.model.precision import Precision
from fshard.sharding.kinds import Kinds
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.rules import Align
from fshard.sharding.spec import P, Shape, axes_of

ALIGN = 16
"""Elements between the possible starts of two leaves: 64 bytes in float32, 32 in bfloat16."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the parameter tree, and where it lives.

    ``shape`` is the whole leaf's, ``compute_shape`` what a unit reads on one rank, after the gather. ``opt`` is where
    the optimizer's state and update live; None: where the leaf itself does. ``kinds`` is the memory they are kept in.
    """

    path: str
    shape: Shape
    dtype: torch.dtype
    trainable: bool
    at_rest: P
    compute: P
    compute_shape: Shape
    aliases: tuple[str, ...] = ()
    precision: Precision = Precision()
    align: Align = None
    opt: P | None = None
    kinds: Kinds = Kinds()

    @property
    def opt_axes(self) -> Axes:
        """The axes over which its optimizer state is cut further than the leaf itself."""
        return () if self.opt is None else tuple(axis for axis in self.opt.axes if axis not in self.at_rest.axes)

    @property
    def numel(self) -> int:
        """Elements that a unit reads on one rank."""
        return math.prod(self.compute_shape)

    @property
    def gather_axes(self) -> Axes:
        """The axes over which the leaf is gathered for compute."""
        return tuple(axis for axis in self.at_rest.axes if axis not in self.compute.axes)

    @property
    def gather_dim(self) -> int | None:
        """The tensor dim along which it is gathered; None if it is flat-sharded or not gathered."""
        dims = [i for i, e in enumerate(self.at_rest.dims) if any(a in self.gather_axes for a in axes_of(e))]
        return dims[0] if dims else None


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a leaf: elements ``start`` to ``stop``, in row-major order, of a box in the whole leaf."""

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
    """Leaves of one unit that rules treat alike: one flat buffer, the grain of communication.

    Attributes:
        name: the unit's name, with ``/1``, ``/2``... for its further groups.
        unit: the unit that owns the leaves; ``root`` for those of no unit.
        leaves: in the order of the buffer.
        starts: where each leaf begins in the full buffer, in elements.
        kind: ``flat`` (the buffer is cut into equal ranges) or ``dim`` (each leaf is cut along one of its dims).
        gather_axes: gathered over these for compute, and scattered over them after backward.
        sum_axes: the data axes on which the leaf is replicated: gradients are all-reduced over them.
        parts: the number of chunks, which is the size of ``gather_axes``.
        chunk: elements of one rank's shard.
        opt_axes: those of ``sum_axes`` over which the shard is cut further for the optimizer: each rank updates a part
            of it, and receives the others' parts after the update.
        opt_parts: the number of these parts, which is the size of ``opt_axes``.
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

    @functools.cached_property
    def owned(self) -> "Group":
        """The group as the optimizer sees it: gathered over ``opt_axes``, too, so that a chunk is what a rank updates.

        The group itself, where ranks update all that they keep. ``own_range`` says where in the shard the chunk lies.
        """
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

    def own_range(self, mesh: Mesh, rank: int | None = None) -> tuple[int, int]:
        """Which elements of its shard a rank updates."""
        width, at = self.chunk // self.opt_parts, mesh.index(self.opt_axes, rank)
        return at * width, (at + 1) * width

    @functools.cached_property
    def kinds(self) -> Kinds:
        """In which memory the leaves are kept, and on which side they are updated."""
        return self.leaves[0].kinds

    @functools.cached_property
    def gathered(self) -> bool:
        """Whether units read a copy that is made when they need it, and not the shard itself."""
        return self.parts > 1 or self.kinds.hosted

    @functools.cached_property
    def offloaded(self) -> bool:
        """Whether gradients go to the host, since the update runs there."""
        return self.trainable and self.kinds.update == "host"

    @functools.cached_property
    def visits(self) -> bool:
        """Whether something comes to the side of the update for it, and goes back after it."""
        return self.trainable and any(self.kinds.moved)

    @property
    def scatter_axes(self) -> Axes:
        """Over which gradients are scattered after each backward: the gather's, or the optimizer's where none are."""
        return self.gather_axes if self.parts > 1 else self.opt_axes

    @property
    def scatter_parts(self) -> int:
        """Into how many parts they are."""
        return self.parts if self.parts > 1 else self.opt_parts

    @property
    def scatter_chunk(self) -> int:
        """The elements of one of these parts."""
        return self.numel // self.scatter_parts

    @property
    def twice(self) -> bool:
        """Whether gradients are scattered again when a step's are complete: over ``opt_axes``."""
        return self.parts > 1 and self.opt_parts > 1

    @property
    def rest_axes(self) -> Axes:
        """The data axes over which what a rank updates is replicated."""
        return tuple(axis for axis in self.sum_axes if axis not in self.opt_axes)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that all leaves share, in which they are kept."""
        return self.leaves[0].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which they are gathered, and units read them."""
        return self.leaves[0].precision.computes_in(self.dtype)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the flat gradient. One that is not scattered over ranks is not rounded."""
        return self.leaves[0].precision.reduces_in(self.dtype) if self.scatter_parts > 1 else self.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradient shards travel to be summed over replicas."""
        return self.leaves[0].precision.reduces_in(self.dtype)

    @functools.cached_property
    def trainable(self) -> bool:
        """Whether the leaves get gradients."""
        return self.leaves[0].trainable

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.parts * self.chunk

    @property
    def staged(self) -> bool:
        """Whether gathered data arrive in a different order than units read them, and pass a staging buffer."""
        return self.kind == "dim" and self.parts > 1

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the full buffer that belong to no leaf."""
        ends = [0, *(start + leaf.numel for start, leaf in zip(self.starts, self.leaves, strict=True))]
        begins = [*self.starts, self.numel]
        return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)

    def shard_range(self, number: int, part: int) -> tuple[int, int]:
        """Where in its shard a part keeps what it has of a leaf: ``(begin, end)`` in elements, maybe empty."""
        start, leaf = self.starts[number], self.leaves[number]
        if self.kind == "dim":
            return start // self.parts, start // self.parts + leaf.numel // self.parts
        low = part * self.chunk
        begin, end = max(start, low), min(start + leaf.numel, low + self.chunk)
        return (begin - low, end - low) if begin < end else (0, 0)

    def piece(self, number: int, mesh: Mesh, rank: int | None = None) -> Piece:
        """What a rank (the mesh's own by default) holds of the leaf with this number."""
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
    """The offset and shape of the part of a leaf that a spec's positional entries leave to a rank."""
    offset, local = [0] * len(shape), list(shape)
    for dim, entry in enumerate(spec.dims):
        axes = axes_of(entry)
        if axes:
            local[dim] = shape[dim] // mesh.axis_size(axes)
            offset[dim] = local[dim] * mesh.index(axes, rank)
    return tuple(offset), tuple(local)


def make_groups(leaves: dict[str, Leaf], owners: dict[str, str], mesh: Mesh, data_axes: Axes) -> tuple[Group, ...]:
    """The groups of a plan, units in the order of their first leaf.

    Inside a group, matrices come before vectors and scalars: optimizers that decay only matrices then need no more
    than two kernel calls a group.
    """
    by_key: dict[tuple[str, object], list[Leaf]] = {}
    for path, leaf in leaves.items():
        kind = "flat" if leaf.gather_dim is None else "dim"
        key = (
            *(leaf.gather_axes, kind, leaf.compute.axes, leaf.dtype, leaf.trainable),
            *(leaf.precision, leaf.align, leaf.opt_axes, leaf.kinds),
        )
        by_key.setdefault((owners[path], key), []).append(leaf)
    groups: list[Group] = []
    count: dict[str, int] = {}
    loads: dict[Axes, list[int]] = {}
    taken = {unit for unit, _ in by_key}
    for (unit, _), members in by_key.items():
        number = count[unit] = count.get(unit, -1) + 1
        while number and f"{unit}/{number}" in taken:  # a unit may be called so
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
    grid = math.lcm(ALIGN, first.align) if isinstance(first.align, int) else ALIGN
    bins = _bins(members, load) if first.align == "leaf" else [members]
    ordered, starts, ends = [], [], []
    for chunk_number, leaves in enumerate(bins):
        placed, end = _one_behind_the_other(leaves, grid * (parts if kind == "dim" else 1))
        ordered += [leaf for leaf, _ in placed]
        starts += [(chunk_number, start) for _, start in placed]
        ends.append(end)
    own = _up(-(-max(ends) // (parts * opt_parts if len(bins) == 1 else 1)), grid)
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


def _one_behind_the_other(leaves: list[Leaf], step: int) -> tuple[list[tuple[Leaf, int]], int]:
    """Leaves with their starts, matrices first, and where the last one ends; starts are multiples of ``step``."""
    placed, end = [], 0
    for leaf in sorted(leaves, key=lambda leaf: len(leaf.shape) < 2):
        placed.append((leaf, end))
        end = _up(end + leaf.numel, step)
    return placed, end


def _bins(leaves: list[Leaf], load: list[int]) -> list[list[Leaf]]:
    """Whole leaves for each chunk, so that the fullest chunk holds little more than the mean.

    The largest leaf goes first, each to the chunk that holds least (Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 of the best there is). The fullest chunk goes to the part that had least of the groups
    before, by ``load``, which is brought up to date: so all parts have about as much to update.
    """
    bins: list[list[Leaf]] = [[] for _ in load]
    held = [0] * len(load)
    for leaf in sorted(leaves, key=lambda leaf: -leaf.numel):
        least = held.index(min(held))
        bins[least].append(leaf)
        held[least] += _up(leaf.numel, ALIGN)
    place = {leaf.path: number for number, leaf in enumerate(leaves)}
    fullest_first = sorted(range(len(load)), key=lambda n: -held[n])
    out: list[list[Leaf]] = [[] for _ in load]
    for part, number in zip(sorted(range(len(load)), key=lambda n: load[n]), fullest_first, strict=True):
        out[part] = sorted(bins[number], key=lambda leaf: place[leaf.path])
        load[part] += held[number]
    return out


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
