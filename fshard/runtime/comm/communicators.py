"""The communicators of a plan: one for each role of transfers and the axes that its groups need."""

from fshard.errors import no_processes
from fshard.runtime.comm.communicator import Communicator, SingleRank, SingleRankTransport, Transport
from fshard.runtime.comm.host_calls import issued
from fshard.schedule.infos import communicators
from fshard.schedule.transfers import KINDS
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan


class Communicators:
    """The communicators that a plan's groups need, made in one order on all ranks.

    That for control messages is made at once. The others depend on the plan: ``open`` makes them when all ranks have
    found that they have one plan. An abstract mesh has none, so that it can plan but not run. ``secondary`` are the
    axes over which groups are gathered again in a step.
    """

    def __init__(self, plan: Plan, secondary: Axes = ()) -> None:
        self.plan, self.secondary = plan, secondary
        self._transport, together = _transport_of(plan.mesh), plan.mesh.together
        meeting = _transport_of(together)
        self._control: Communicator | None = None
        if meeting is not None:
            self._control = meeting.communicator("control", together.axis_names)
        self.made: dict[tuple[str, Axes], Communicator] = {}
        self._opened = False

    @property
    def transport(self) -> Transport:
        """Return what joins the ranks. Raises PlanError on an abstract mesh."""
        if self._transport is None:
            raise no_processes()
        return self._transport

    @property
    def control(self) -> Communicator:
        """The communicator of control messages, over all ranks that make a step.

        Raises:
            PlanError: the mesh is abstract.
        """
        if self._control is None:
            raise no_processes()
        return self._control

    def open(self) -> None:
        """Make the communicators of groups. Collective at its first call."""
        if not self._opened:
            needed = communicators(self.plan, self.secondary)
            self.made = {need: self.transport.communicator(*need) for need in needed}
            self._opened = True

    def over(self, kind: str, axes: Axes) -> Communicator:
        """The communicator of a kind of transfer over some axes."""
        if self.plan.mesh.axis_size(axes) == 1:
            return SingleRank()
        return issued(self.made[KINDS[kind].role, axes])


def _transport_of(mesh: Mesh) -> Transport | None:
    """Return what joins the ranks of a mesh; None on an abstract one."""
    made: Transport | None = mesh.transport or (SingleRankTransport() if mesh.size == 1 else None)
    return made
