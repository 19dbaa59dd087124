"""One step on all ranks, in five stages. Each is a function of what the stage before returned.

=============  =========================================================================================================
``prepare``    A rank makes ready what it is about to run: its program with a schedule and memory, and the batch. If it
               cannot run anything, it says so in the handshake.
``handshake``  Ranks compare what they are about to run, before anything else is sent.
``run``        The program runs, and with it every op of the schedule before the consensus. A rank whose program fails
               still issues the collectives that its schedule holds, with whatever data it has: no rank hangs.
``consensus``  Ranks exchange their losses, norms and failures. All learn at one point whether the step happened.
``conclude``   The failure of any rank is raised on all of them. What is left becomes the next state.
=============  =========================================================================================================

The three in the middle, in which ranks meet, are here: one code for every kind of step. What is prepared and what is
concluded depends on the kind: ``runner`` has a loss function with one pass, ``parts.step_runner`` a step function with
as many passes and updates as it makes.
"""

import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch

from fshard.runtime.comm import COLLECTIVES, Communicator, mesh_communicator
from fshard.runtime.comm.communicator import SingleRankTransport, Transport
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.execution.observers import begin
from fshard.runtime.steps.consensus import FAILED, OK, Columns, JointRow, exchange_row
from fshard.runtime.steps.failures import raise_failure, together
from fshard.runtime.steps.handshake import Agreement, Terms, agree
from fshard.runtime.steps.rank_end import End, attempted, foretold
from fshard.schedule.ops import STEP_KINDS, Op
from fshard.schedule.transfers import KINDS
from fshard.sharding.mesh import Axes, Mesh

T = TypeVar("T")


class Met(NamedTuple, Generic[T]):
    """The numbers that ranks have told each other at the end of a step.

    Attributes:
        end: how this rank's part ended.
        mine: what this rank has read of its part; None if that did not go well.
        row: the numbers of all ranks; statuses alone if one has failed and devices run behind their hosts.
    """

    end: End
    mine: T | None
    row: JointRow

    @property
    def whole(self) -> bool:
        """Tell whether the row has more than statuses."""
        return bool(self.row.places)


class Meetings:
    """The stages of steps in which the ranks of a mesh meet."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._pace = Pace()

    @functools.cached_property
    def control(self) -> Communicator:
        """The control communicator over the whole mesh."""
        return mesh_communicator(self.mesh)

    @functools.cached_property
    def transport(self) -> Transport:
        """The transport of the mesh."""
        return self.mesh.transport or SingleRankTransport()

    def handshake(
        self, executor: Scheduled | OnDemand, terms: Terms, comms: Sequence[Communicators], axes: Sequence[Axes]
    ) -> Agreement:
        """Compare what ranks are about to run, and open the communicators that it needs.

        Args:
            executor: of this rank.
            terms: what must be equal.
            comms: the communicators of each pass.
            axes: those of the collectives that the program itself calls.

        Raises:
            ReplicationError, ScheduleError, BatchError, PeerError: on every rank alike.
        """
        transport = self.transport
        begin(self.mesh, executor)
        with together(transport):
            agreed = executor.handshake(lambda: agree(self.control, terms))
            for each in comms:
                each.open()
            for some in axes:
                transport.communicator(COLLECTIVES, some)  # all ranks are here, and none can fail alone yet
        return agreed

    def run(self, executor: Scheduled | OnDemand, program: Callable[[], T]) -> tuple[T | None, End]:
        """Run this rank's program. Where it fails, ranks that wait in its collectives learn at once that none come."""
        result, end = attempted(program, executor, self.transport)
        if end.status != OK:
            self.transport.abort(COLLECTIVES, str(end))
        return result, end

    def consensus(
        self,
        executor: Scheduled | OnDemand,
        end: End,
        tally: Callable[[], T],
        columns: Callable[[T | None, float], Columns],
    ) -> Met[T]:
        """Exchange how each rank's part went, and its numbers: one read of the device, and one exchange.

        Args:
            executor: of this rank.
            end: how its part ended.
            tally: reads its numbers from the device; called if the part went well.
            columns: these numbers, or those of a part that did not go well, and the seconds that this rank was busy.
        """
        transport, mine = self.transport, None
        failed = foretold(transport, self.control, end.status)
        if failed is not None:
            return Met(end, None, failed)
        if end.status == OK:
            with transport.program():
                mine, end = _read(tally, end)
        times = executor.times if isinstance(executor, Scheduled) else ()
        busy = self._pace.busy(executor.record, times) if self.control.size > 1 else 0.0
        row = exchange_row(self.control, end.status, columns(mine, busy))
        self._pace.over()
        return Met(end, mine, row)

    def raise_failure(self, end: End, status: Sequence[int]) -> None:
        """Raise the failure of a step on all ranks: this rank's own, or that of another. Collective."""
        raise_failure(self.control, end.failure, status, status[self.mesh.rank])


def _read(tally: Callable[[], T], end: End) -> tuple[T | None, End]:
    """Return what a rank reads of its part, and how it ended: a device reports late what went wrong there."""
    try:
        return tally(), end
    except torch.AcceleratorError:  # the device is lost, and those of other ranks wait for it
        raise
    except Exception as error:
        return None, End(FAILED, error)


TRANSFERS = frozenset(row.wait for row in KINDS.values() if row.link)
"""The ops that wait for something that travels between ranks."""

WAITS = TRANSFERS | STEP_KINDS
"""These, and those in which ranks meet: whoever comes last waits for nobody."""


def waited(record: Sequence[Op], times: Sequence[float], kinds: frozenset[str] = WAITS) -> float:
    """Seconds in ops of these kinds.

    Args:
        record: the ops that ran.
        times: when each of them began, and one more.
        kinds: of ops.

    >>> waited([Op("handshake"), Op("forward", "root"), Op("consensus")], [0.0, 1.0, 3.0, 3.5])
    1.5
    """
    return sum([times[at + 1] - times[at] for at, op in enumerate(record) if op.kind in kinds])


class Pace:
    """The time that this rank spends on steps of its own accord: its code between steps, and in them.

    Attributes:
        since: when the step before was over on all ranks; None before there was one.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def busy(self, record: Sequence[Op], times: Sequence[float]) -> float:
        """Seconds since the step before in which this rank did not wait for others. Begins the next count.

        Args:
            record: the ops of this step so far.
            times: when each of them began, and the one that is under way; empty if that is not known.
        """
        if len(times) != len(record) + 1:
            return 0.0
        since = times[0] if self.since is None else self.since
        return max(perf_counter() - since - waited(record, times), 0.0)

    def over(self) -> None:
        """A step is over, on all ranks at once."""
        self.since = perf_counter()
