"""The ranks that one collective joins."""

from dataclasses import dataclass

from fshard.errors import no_processes
from fshard.runtime.comm import COLLECTIVES, Lane, LocalTransport, Processes
from fshard.sharding.mesh import Axes, Mesh


@dataclass(frozen=True)
class Group:
    """This rank's neighbours along some axes of a mesh, in the order in which the axes were named.

    ``implicit`` says that values are varying again as soon as a collective has made them invariant: see ``scope``.
    """

    mesh: Mesh
    axes: Axes
    implicit: bool = False

    def __str__(self) -> str:
        return "+".join(self.axes)

    @property
    def size(self) -> int:
        """How many they are."""
        return self.mesh.axis_size(self.axes)

    @property
    def index(self) -> int:
        """Which of them this rank is; the last axis runs fastest."""
        return self.mesh.index(self.axes)

    @property
    def lane(self) -> Lane:
        """What joins them."""
        transport = self.mesh.transport
        if transport is None and self.mesh.size > 1:
            raise no_processes()
        lane: Lane = (transport or LocalTransport()).lane(COLLECTIVES, self._sorted)
        return lane

    def foresee(self) -> None:
        """A program that is traced will need the lane."""
        transport = self.mesh.transport
        if isinstance(transport, Processes) and transport.foreseen is not None:
            transport.foreseen[self._sorted] = None

    @property
    def order(self) -> list[int] | None:
        """For each position its place in the lane, which is ordered by rank; None where that is the same."""
        if self.axes == self._sorted:
            return None
        places = {rank: place for place, rank in enumerate(sorted(self.mesh.ranks(self.axes)))}
        return [places[rank] for rank in self.mesh.ranks(self.axes)]

    @property
    def _sorted(self) -> Axes:
        return tuple(axis for axis in self.mesh.axis_names if axis in self.axes)
