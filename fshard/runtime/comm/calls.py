"""The first exchange of every collective call of the library. It detects ranks that are at different calls."""

import threading
from collections.abc import Sequence
from zlib import crc32

import torch

from fshard.errors import LossError, ScheduleError, lines
from fshard.runtime.comm.all_ranks import raise_failures, tell_failure
from fshard.runtime.comm.call_site import call_site, in_program
from fshard.runtime.comm.communicator import Communicator
from fshard.runtime.comm.exchange import exchange, exchange_text
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import DisableFuncTorch, DispatchModeKey, dispatch_mode

WIDTH = 12
"""Numbers of a row: the call, and further values that it compares. All rows have this length, and no other message has
it, so a row is compared only with rows."""

CALL_SITE_BYTES = 512
"""Bytes of a call site in an exchange."""

REFUSED = -1
"""The first number of the row of a rank that raises in the place of the call."""

MEETING = "_fshard_meeting"
"""The attribute of a thread that holds its collective call (``collective_call.Meeting``)."""


def announce(comm: Communicator, call: str, values: Sequence[int] = ()) -> list[list[int]]:
    """Compare the calls that ranks are at, before anything else is sent. Collective.

    Args:
        comm: the control communicator over the whole mesh.
        call: names this call.
        values: further numbers to exchange, at most ``WIDTH - 1``.

    Returns:
        The values of each rank.

    Raises:
        ScheduleError: ranks are at different calls. All ranks raise it.
        PeerError: another rank raised before it took part.
    """
    if comm.size == 1:
        return [list(values)]
    row = [crc32(call.encode()), *values, *[0] * (WIDTH - 1 - len(values))]
    with DisableFuncTorch():  # an active transform would wrap the tensors
        rows = _exchanged(comm, row)
        if refused := [rank for rank, other in enumerate(rows) if other[0] == REFUSED]:
            _raise_refusals(comm, refused)
        if any(other[0] != row[0] for other in rows):
            raise different_calls(exchange_text(comm, call_site(), CALL_SITE_BYTES))
    return [other[1 : 1 + len(values)] for other in rows]


def refuse(comm: Communicator, error: BaseException) -> None:
    """Tell ranks that announce a call that this one raises an error in the place of it. Collective."""
    with DisableFuncTorch():
        _exchanged(comm, [REFUSED, *[0] * (WIDTH - 1)])
        tell_failure(comm, error)


def _exchanged(comm: Communicator, row: Sequence[int]) -> list[list[int]]:
    """The rows of all ranks."""
    if (meeting := getattr(threading.current_thread(), MEETING, None)) is not None:
        meeting.met = True
    rows: list[list[int]] = exchange(comm, torch.tensor(row, device="cpu")).tolist()
    return rows


def _raise_refusals(comm: Communicator, refused: Sequence[int]) -> None:
    """Raise what these ranks, which raise in the place of the call, say of that. Collective."""
    head = f"{len(refused)} of {comm.size} ranks raised before they took part in this call, so no rank made it:"
    raise_failures(comm, None, head, "Nothing was sent or changed: states can be used.", refused)


def enter(mesh: Mesh, call: str) -> None:
    """Announce a collective call that has no exchange of its own on the control communicator. Collective.

    Raises:
        ScheduleError: ranks are at different calls. All ranks raise it.
        LossError: the call is made inside of a function that a step runs.
    """
    refuse_nested(call)
    if mesh.size > 1 and mesh.transport is not None:
        try:
            announce(mesh.transport.communicator("control", mesh.axis_names), call)
        except ScheduleError:
            mesh.transport.abort(COLLECTIVES)  # as ranks at a step do: all continue with new communicators
            raise


def refuse_nested(call: str) -> None:
    """Refuse a collective call that a function makes which a step runs.

    A step first runs such a function on tensors without data, which the call cannot use. If no trace can tell what the
    function does, its first run has real tensors.

    Raises:
        LossError: such a run is under way.
    """
    if dispatch_mode(DispatchModeKey.FAKE) is not None or in_program("Passes.run"):
        raise LossError(
            f"{call}: a function that a step runs made this collective call of its own: make the call before the step "
            f"and give its result in the batch, or compose both in fs.make_step, which takes states in the batch"
        )


def different_calls(call_sites: Sequence[str]) -> ScheduleError:
    """The error of ranks that are at different collective calls."""
    rows = [f"rank {rank}: {site}" for rank, site in enumerate(call_sites)]
    remedy = (
        "All ranks must make the same calls of the library in one order, also those whose result only one rank needs. "
        "Nothing was sent or changed: states can be used."
    )
    return ScheduleError(lines("ranks are at different calls:", rows, remedy))
