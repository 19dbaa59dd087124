"""Parts of a mesh: the ranks that have all but one axis in common with this one, apart from the others."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TypeVar

from fshard.sharding.mesh import Axes, Mesh

M = TypeVar("M", bound="PartMesh")


@dataclass(frozen=True)
class PartMesh(Mesh):
    """The ranks at one position along an axis: a mesh on which that axis has one rank.

    Axes keep their names, so the rules and the batch spec of a plan mean the same on it. Stages of a pipeline have such
    parts; their ranks make each step together with those of the others.

    >>> from fshard.sharding.mesh import abstract_mesh
    >>> part = part_of(abstract_mesh((2, 4), ("stage", "data"), rank=6), "stage")
    >>> dict(part.shape), part.rank, part.position, part.members
    ({'stage': 1, 'data': 4}, 2, 1, (4, 5, 6, 7))
    """

    all_ranks: Mesh = field(default_factory=lambda: Mesh((1,), ("replica",)), compare=False, repr=False)
    over: str = "replica"

    @property
    def whole(self) -> Mesh:
        """The mesh of all parts."""
        return self.all_ranks

    @property
    def together(self) -> Mesh:
        """The mesh of all parts: its ranks make each step together."""
        return self.all_ranks

    @property
    def position(self) -> int:
        """The number of this part."""
        return self.all_ranks.index(self.over)

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of this part on the mesh of all, by their rank on this one."""
        return self.all_ranks.ranks(_others(self.all_ranks, self.over))


@dataclass(frozen=True)
class ReplicaMesh(PartMesh):
    """The ranks of one replica, which trains apart from the others.

    >>> from fshard.sharding.mesh import abstract_mesh
    >>> part = part_of(abstract_mesh((2, 4), ("replica", "data"), rank=6), "replica", ReplicaMesh)
    >>> part.replica, part.replicas, part.everyone((0,)), part.together is part
    (1, 2, (0, 4), True)
    """

    @property
    def together(self) -> Mesh:
        """The part itself: replicas make steps apart from each other."""
        return self

    @property
    def replica(self) -> int:
        """The number of this replica."""
        return self.position

    @property
    def replicas(self) -> int:
        """Return how many there are."""
        return self.all_ranks.axis_size(self.over)

    def everyone(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of all replicas, on the mesh of all, that have these ranks on theirs."""
        return tuple(sorted(far for rank in ranks for far in self.all_ranks.ranks(self.over, self.members[rank])))


def part_of(mesh: Mesh, over: str, kind: type[M] = PartMesh) -> M:  # type: ignore[assignment]
    """The part of a mesh that holds this rank; it has no transport yet.

    Args:
        mesh: the mesh of all parts.
        over: the axis along which they lie.
        kind: the kind of parts.
    """
    sizes = tuple(1 if axis == over else size for axis, size in mesh.shape.items())
    rank = mesh.index(_others(mesh, over))
    return kind(sizes, mesh.axis_names, rank, mesh.device, None, mesh, over)


def joined_part(mesh: Mesh, over: str, kind: type[M] = PartMesh) -> M:  # type: ignore[assignment]
    """The same with what joins its ranks, where the mesh has that."""
    part = part_of(mesh, over, kind)
    return part if mesh.transport is None else dataclasses.replace(part, transport=mesh.transport.part(part))


def _others(mesh: Mesh, over: str) -> Axes:
    return tuple(axis for axis in mesh.axis_names if axis != over)
