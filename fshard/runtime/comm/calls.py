"""The first exchange of every collective call: it tells ranks at once that they are at different ones."""

from collections.abc import Sequence
from zlib import crc32

import torch

from fshard.errors import ScheduleError, lines
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.communicator import COLLECTIVES, Communicator
from fshard.runtime.comm.exchange import exchange, exchange_text
from fshard.sharding.mesh import Mesh

WIDTH = 12
"""Numbers of a row: which call it is, and what else a call compares. All calls' rows are as long, and no other message
is, so that a row is only ever compared with a row."""

CALL_SITE_BYTES = 512
"""Bytes of a text that says where a rank is."""


def announce(comm: Communicator, call: str, values: Sequence[int] = ()) -> list[list[int]]:
    """Compare which call each rank is at, before anything else is sent. Collective.

    Args:
        comm: the control communicator over the whole mesh.
        call: which call this is.
        values: what else ranks tell each other, at most ``WIDTH - 1`` numbers.

    Returns:
        The values of each rank.

    Raises:
        ScheduleError: ranks are at different calls, on all of them alike.
    """
    if comm.size == 1:
        return [list(values)]
    row = [crc32(call.encode()), *values, *[0] * (WIDTH - 1 - len(values))]
    with torch._C._DisableFuncTorch():  # a transform under way would wrap what is sent
        rows = exchange(comm, torch.tensor(row, device="cpu")).tolist()
        if any(other[0] != row[0] for other in rows):
            raise different_calls(exchange_text(comm, call_site(), CALL_SITE_BYTES))
    return [other[1 : 1 + len(values)] for other in rows]


def enter(mesh: Mesh, call: str) -> None:
    """Announce a collective call that has no exchange of its own on the control communicator. Collective.

    Raises:
        ScheduleError: ranks are at different calls, on all of them alike.
    """
    if mesh.size > 1 and mesh.transport is not None:
        try:
            announce(mesh.transport.communicator("control", mesh.axis_names), call)
        except ScheduleError:
            mesh.transport.abort(COLLECTIVES)  # as ranks do that are at a step: all begin with new communicators
            raise


def different_calls(call_sites: Sequence[str]) -> ScheduleError:
    """The error of ranks that are at different collective calls."""
    rows = [f"rank {rank}: {site}" for rank, site in enumerate(call_sites)]
    remedy = (
        "All ranks must make the same calls of the library in one order, also those whose result only one rank needs. "
        "Nothing was sent or changed: states can be used."
    )
    return ScheduleError(lines("ranks are at different calls:", rows, remedy))
