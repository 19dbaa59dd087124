"""The end of a rank's part of a step, and what it owes the other ranks then: the same for every kind of step."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fshard.errors import CommError, LossError, PeerError, ScheduleError
from fshard.runtime.comm import COLLECTIVES, Communicator
from fshard.runtime.comm.communicator import Transport
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.steps.consensus import CUT, FAILED, OK, RETRY, JointRow, exchange_row
from fshard.runtime.steps.failures import starved
from fshard.runtime.steps.handshake import Terms, agree

T = TypeVar("T")


@dataclass(frozen=True)
class End:
    """The end of a rank's own part of a step.

    Attributes:
        status: ``OK``, ``FAILED``, ``RETRY`` or ``CUT``.
        failure: what it raised.
        left: where it left its schedule, if it did.
    """

    status: int = OK
    failure: BaseException | None = None
    left: str = ""

    def __str__(self) -> str:
        return f"{self.failure or self.left}"


DONE = End()
"""The end of a part that did all it had to do."""


def attempted(program: Callable[[], T], executor: Scheduled | OnDemand, transport: Transport) -> tuple[T | None, End]:
    """Return what a program returns, and how it ended. What all ranks raise together is raised at once."""
    try:
        with transport.program():
            return program(), DONE
    except CommError as error:
        if executor.lost:
            raise
        return None, End(CUT, error)
    except Mispredicted as reason:
        return None, End(RETRY, left=str(reason))
    except BaseException as error:  # Ctrl-C too: other ranks wait for this one's collectives
        if executor.lost:
            raise
        if starved(error):
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        return None, End(FAILED, error)


def drained(executor: Scheduled, end: End) -> End:
    """Run what is left of a schedule: for the update, or, after a failure, for the other ranks alone.

    Raises:
        CommError: a collective failed; or an op of this rank, twice, so that the others cannot go on.
    """
    try:
        executor.finish()
    except (CommError, PeerError, ScheduleError, LossError):
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        end = End(FAILED, error) if end.status == OK else end
    executor.drain()
    return end


def foretold(transport: Transport, control: Communicator, status: int) -> JointRow | None:
    """Exchange statuses where devices run behind their hosts, before anybody reads a device. Collective there.

    A rank whose program has failed leaves its peers' devices waiting in a collective of the program, and a peer that
    reads its device would wait with it, out of reach of any message. So all ranks learn of the failure first, and abort
    these collectives.

    Args:
        transport: of the mesh.
        control: the control communicator over the whole mesh.
        status: how this rank's part went.

    Returns:
        The statuses, if a rank's part did not go well; else None. None too, without an exchange, where a wait for a
        collective blocks the host: a failure is an error there.
    """
    if not transport.asynchronous:
        return None
    row = exchange_row(control, status, {})
    if not any(row.status):
        return None
    transport.abort(COLLECTIVES, "the step failed on another rank" if status == OK else "the step failed")
    return row


def decline(control: Communicator, call: str, batch: Any, error: BaseException) -> NoReturn:
    """Tell the other ranks, which wait in the handshake, why this one does not take part, and raise it."""
    agree(control, Terms(call, batch=batch), error)
    raise error
