"""A rank that gave up and still handles its error keeps no connection open."""

import contextlib
import time

import pytest
import torch

import fshard as fs
from fshard.runtime.comm import exchange
from tests.shared.workers import Pools

pytestmark = pytest.mark.processes


def keeping(call: str) -> float:
    """On a rank: seconds that rank 2 waits for a message of rank 0, which lost rank 1 in a collective.

    Rank 0 closes its connections, as ranks do that give up, and keeps the error with its traceback meanwhile.
    """
    with fs.make_mesh((-1,), ("shard",), timeout=30.0, shared_memory=False) as mesh:
        transport = mesh.transport
        comm, control = (transport.communicator(role, ("shard",)) for role in ("collectives", "control"))
        exchange(control, torch.zeros(1))  # all connections are there
        began = time.monotonic()
        calls = {
            "all_gather": lambda: comm.all_gather(torch.empty(6), torch.ones(2)),
            "reduce_scatter": lambda: comm.reduce_scatter(torch.empty(2), torch.ones(6), torch.empty(4), False),
            "all_to_all": lambda: comm.all_to_all(torch.empty(6), torch.ones(6), None, None),
            "all_reduce": lambda: comm.all_reduce(torch.ones(2)),
        }
        if mesh.rank == 0:
            try:
                calls[call]().wait()
            except fs.errors.CommError as error:
                transport.abort("collectives")
                exchange(control, torch.zeros(1))
                assert error.__traceback__ is not None
        elif mesh.rank == 1:
            time.sleep(0.2)  # rank 0 waits
            transport.abort("collectives")
            exchange(control, torch.zeros(1))
        else:
            with contextlib.suppress(RuntimeError):
                comm.group.recv([torch.empty(1)], 0, 7).wait()
            exchange(control, torch.zeros(1))
        return time.monotonic() - began


@pytest.mark.parametrize(
    "call",
    ["all_gather", "all_reduce", *(pytest.param(c, marks=pytest.mark.slow) for c in ("reduce_scatter", "all_to_all"))],
)
def test_an_error_that_is_kept_keeps_no_connection(pool: Pools, call: str) -> None:
    assert max(pool(3).run(keeping, call)) < 15.0
