"""The part of a mesh that one replica trains on, apart from the others."""

import functools
from dataclasses import dataclass, field

from fshard.sharding.mesh import Axes, Mesh


@dataclass(frozen=True)
class PartMesh(Mesh):
    """The ranks of one replica: a mesh on which the axis of replicas has one rank.

    Axes keep their names, so the rules and the batch spec of a plan mean the same on it.

    >>> from fshard.sharding.mesh import abstract_mesh
    >>> part = part_of(abstract_mesh((2, 4), ("replica", "data"), rank=6), "replica")
    >>> dict(part.shape), part.rank, part.replica, part.replicas, part.members
    ({'replica': 1, 'data': 4}, 2, 1, 2, (4, 5, 6, 7))
    """

    all_ranks: Mesh = field(default_factory=lambda: Mesh((1,), ("replica",)), compare=False, repr=False)
    over: str = "replica"

    @property
    def whole(self) -> Mesh:
        """The mesh of all replicas."""
        return self.all_ranks

    @property
    def replica(self) -> int:
        """The number of this replica."""
        return self.all_ranks.index(self.over)

    @property
    def replicas(self) -> int:
        """Return how many there are."""
        return self.all_ranks.axis_size(self.over)

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of this replica on the mesh of all, by their rank on this one."""
        return self.all_ranks.ranks(_others(self.all_ranks, self.over))

    def everyone(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of all replicas, on the mesh of all, that have these ranks on theirs."""
        return tuple(sorted(far for rank in ranks for far in self.all_ranks.ranks(self.over, self.members[rank])))


def part_of(mesh: Mesh, over: str) -> PartMesh:
    """The part of a mesh that holds this rank's replica; it has no transport yet.

    Args:
        mesh: the mesh of all replicas.
        over: the axis along which they lie.
    """
    sizes = tuple(1 if axis == over else size for axis, size in mesh.shape.items())
    rank = mesh.index(_others(mesh, over))
    return PartMesh(sizes, mesh.axis_names, rank, mesh.device, None, mesh, over)


def _others(mesh: Mesh, over: str) -> Axes:
    return tuple(axis for axis in mesh.axis_names if axis != over)
