"""Communication between ranks. Only modules of this room import torch.distributed.

A *transport* joins the ranks of a mesh. A *communicator* of it serves one role over some axes, so that gathers,
reductions and control messages never queue behind each other. Its collectives are asynchronous: each returns a
*handle*, and after ``handle.wait()`` the work that follows may read the result.
"""

from fshard.runtime.comm.all_ranks import (
    all_ranks_or_raise,
    each_rank_or_raise,
    first_rank_or_raise,
    mesh_communicator,
    raise_failures,
)
from fshard.runtime.comm.calls import CALL_SITE_BYTES, announce, enter, refuse_nested
from fshard.runtime.comm.collective_call import collective_call, telling, told
from fshard.runtime.comm.communicator import Communicator, Done, Handle
from fshard.runtime.comm.exchange import exchange, exchange_bytes, exchange_text
from fshard.runtime.comm.facts import Facts, digest
from fshard.runtime.comm.processes import ProcessTransport
from fshard.schedule.transfers import COLLECTIVES

__all__ = [
    "CALL_SITE_BYTES",
    "COLLECTIVES",
    "Communicator",
    "Done",
    "Facts",
    "Handle",
    "ProcessTransport",
    "all_ranks_or_raise",
    "announce",
    "collective_call",
    "digest",
    "each_rank_or_raise",
    "enter",
    "exchange",
    "exchange_bytes",
    "exchange_text",
    "first_rank_or_raise",
    "mesh_communicator",
    "raise_failures",
    "refuse_nested",
    "telling",
    "told",
]
