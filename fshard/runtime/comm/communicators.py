"""The communicators of a plan: one for each role and axes that its groups need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fshard.runtime.comm import Communicator, Transport
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan


class Communicators:
    """The communicators that a plan's groups need, in one order on all ranks.

    That for control messages is made at once. The others depend on the plan: ``open`` makes them when all ranks have
    found that they have one plan.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self.plan, self.transport = plan, transport
        self.control = transport.communicator("control", plan.mesh.axis_names)
        self.gather: dict[Axes, Communicator] = {}
        self.scatter: dict[Axes, Communicator] = {}
        self.sum: dict[Axes, Communicator] = {}
        self.spread: dict[Axes, Communicator] = {}
        self.opened = False

    def open(self) -> None:
        """Make the communicators of groups. Collective at its first call."""
        if self.opened:
            return
        groups, comm = self.plan.groups, self.transport.communicator
        sums = {axes for g in groups for axes in (g.rest_axes, *([g.opt_axes] if g.second_scatter else []))}
        self.gather.update((axes, comm("gather", axes)) for axes in sorted({g.gather_axes for g in groups}))
        self.scatter.update((axes, comm("reduce", axes)) for axes in sorted({g.scatter_axes for g in groups}))
        self.sum.update((axes, comm("sum", axes)) for axes in sorted(sums))
        spreads = sorted({g.opt_axes for g in groups if g.opt_parts > 1})
        self.spread.update((axes, comm("spread", axes)) for axes in spreads)
        self.opened = True

    def senders(self) -> "Senders":
        """The communicators that all-gather partially updated groups, by group id."""
        cut = {g.id: g.opt_axes for g in self.plan.groups if g.opt_parts > 1 and g.trainable}
        return Senders(self.spread, cut)


@dataclass(frozen=True)
class Senders(Mapping[int, Communicator]):
    """Communicators by group id, which are looked up when they are used: they may still have to be made."""

    comms: Mapping[Axes, Communicator]
    axes: Mapping[int, Axes]

    def __getitem__(self, group: int) -> Communicator:
        return self.comms[self.axes[group]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)
