"""The ranks that one collective joins."""

from dataclasses import dataclass

from fshard.errors import no_processes
from fshard.runtime.comm import Communicator
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.comm.host_calls import issued
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Axes, Mesh


@dataclass(frozen=True)
class Ranks:
    """This rank's neighbours along some axes of a mesh, in the order of the axes as named.

    ``implicit``: a collective's invariant result becomes varying at once, see ``scope``.
    """

    mesh: Mesh
    axes: Axes
    implicit: bool = False

    def __str__(self) -> str:
        return "+".join(self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.axis_size(self.axes)

    @property
    def index(self) -> int:
        """This rank's position; the last axis runs fastest."""
        return self.mesh.index(self.axes)

    @property
    def comm(self) -> Communicator:
        """The communicator that joins them."""
        transport = self.mesh.transport
        if transport is None and self.mesh.size > 1:
            raise no_processes()
        return issued((transport or SingleRankTransport()).communicator(COLLECTIVES, self._sorted))

    @property
    def order(self) -> list[int] | None:
        """The place in the communicator, which is ordered by rank, of each position; None where both agree."""
        if self.axes == self._sorted:
            return None
        places = {rank: place for place, rank in enumerate(sorted(self.mesh.ranks(self.axes)))}
        return [places[rank] for rank in self.mesh.ranks(self.axes)]

    @property
    def _sorted(self) -> Axes:
        return tuple(axis for axis in self.mesh.axis_names if axis in self.axes)
