"""The communicators of a plan: one for each kind of transfer and the axes that its groups need."""

from collections.abc import Iterator

from fshard.errors import no_processes
from fshard.runtime.comm.communicator import Communicator, SingleRankTransport, Transport
from fshard.schedule.infos import secondary_axes
from fshard.schedule.transfers import KINDS
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan


class Communicators:
    """The communicators that a plan's groups need, made in one order on all ranks.

    That for control messages is made at once. The others depend on the plan: ``open`` makes them when all ranks have
    found that they have one plan. An abstract mesh has none, so that it can plan but not run. ``secondary`` are the
    axes over which groups are gathered again in a step.
    """

    def __init__(self, plan: Plan, secondary: Axes = ()) -> None:
        self.plan, self.secondary = plan, secondary
        self._transport: Transport | None = plan.mesh.transport or (
            SingleRankTransport() if plan.mesh.size == 1 else None
        )
        self._control: Communicator | None = None
        if self._transport is not None:
            self._control = self._transport.communicator("control", plan.mesh.axis_names)
        self.made: dict[tuple[str, Axes], Communicator] = {}

    @property
    def transport(self) -> Transport:
        """What joins the ranks. Raises PlanError on an abstract mesh."""
        if self._transport is None:
            raise no_processes()
        return self._transport

    @property
    def control(self) -> Communicator:
        """The communicator of control messages, over the whole mesh. Raises PlanError on an abstract mesh."""
        if self._control is None:
            raise no_processes()
        return self._control

    def open(self) -> None:
        """Make the communicators of groups. Collective at its first call."""
        if not self.made:
            needed = {need for group in self.plan.groups for need in _needs(group, self.secondary)}
            order = [*KINDS]
            for kind, axes in sorted(needed, key=lambda need: (order.index(need[0]), need[1])):
                self.made[kind, axes] = self.transport.communicator(kind, axes)

    def over(self, kind: str, axes: Axes) -> Communicator:
        """The communicator of a kind of transfer over some axes."""
        return self.made[kind, axes]


def _needs(group: Group, secondary: Axes) -> Iterator[tuple[str, Axes]]:
    """The kinds of transfers of a group that communicate, and their axes."""
    yield "all_gather", group.gather_axes
    if fast := secondary_axes(group, secondary):
        yield "regather", fast
    yield "reduce_scatter", group.scatter_axes
    yield "replica_reduce", group.rest_axes
    if group.second_scatter:
        yield "replica_reduce", group.opt_axes
    if group.opt_parts > 1:
        yield "update_gather", group.opt_axes
