"""Communication. The only folder whose modules import torch.distributed.

A *transport* joins the ranks of a mesh; a *communicator* serves one role over some of its axes, so that gathers,
reduces and control messages never queue behind each other. Every collective is asynchronous: it returns a
*handle*, and ``handle.wait()`` makes the result safe to read for the work that follows.
"""

from fshard.runtime.comm.all_ranks import (
    all_ranks_or_raise,
    each_rank_or_raise,
    first_rank_or_raise,
    mesh_communicator,
    raise_failures,
)
from fshard.runtime.comm.calls import CALL_SITE_BYTES, announce, enter
from fshard.runtime.comm.communicator import (
    COLLECTIVES,
    Communicator,
    Done,
    Events,
    Handle,
    SingleRank,
    SingleRankTransport,
    Transport,
)
from fshard.runtime.comm.exchange import exchange, exchange_bytes, exchange_text
from fshard.runtime.comm.gloo import GlooCommunicator
from fshard.runtime.comm.host import HostCommunicator
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.processes import ProcessTransport, join

__all__ = [
    "COLLECTIVES",
    "CALL_SITE_BYTES",
    "SingleRank",
    "Done",
    "GlooCommunicator",
    "Handle",
    "HostCommunicator",
    "Communicator",
    "SingleRankTransport",
    "Events",
    "NcclCommunicator",
    "ProcessTransport",
    "Transport",
    "all_ranks_or_raise",
    "announce",
    "each_rank_or_raise",
    "enter",
    "exchange",
    "exchange_bytes",
    "exchange_text",
    "first_rank_or_raise",
    "join",
    "mesh_communicator",
    "raise_failures",
]
