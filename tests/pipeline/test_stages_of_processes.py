"""Pipelines of real processes: the numbers of one plain process, and the errors where a rank is killed."""

import os
import signal
import time
from typing import Any

import pytest

import fshard as fs
from fshard.pipeline.mail import Mail
from tests.pipeline.staged_runs import StagedRun, made, on_rank, plain
from tests.shared import parity
from tests.shared.workers import Pool, Pools, WorkerError

TIMEOUT = 10.0
"""Seconds that a rank waits for another."""


def trained(program: str, chunks: int) -> parity.Run:
    """On a rank: train."""
    with fs.make_mesh((-1, 1), ("stage", "data")) as mesh:
        return on_rank(StagedRun(program, stages={"chunks": chunks}), mesh)


def test_processes(pool: Pools) -> None:
    """Edges that skip over stages have several messages under way."""
    assert parity.differences(pool(2).run(trained, "unet", 2), plain("unet"), parity.Near(1e-5, 1e-5, 2e-5)) == []


def killed(doomed: int, verb: str) -> str:
    """On a rank: the error of a step in which the other rank dies, between a send and its receive, with its seconds."""
    with fs.make_mesh((-1, 1), ("stage", "data"), timeout=TIMEOUT) as mesh:
        right, armed = getattr(Mail, verb), [False]

        def dying(self: Mail, key: Any) -> None:
            if armed[0] and key[1] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            right(self, key)

        setattr(Mail, verb, dying)  # these processes end with the test
        step, _, state, batch = made(StagedRun(), mesh)
        state, _ = step(state, batch(0))
        armed[0] = mesh.rank == doomed
        began = time.monotonic()
        try:
            step(state, batch(1))
        except fs.errors.ShardError as error:
            raise RuntimeError(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}") from None
    return "returned"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("doomed", "verb"), [(1, "_receive"), pytest.param(0, "_send", marks=pytest.mark.slow)], ids=["receive", "send"]
)
def test_a_killed_rank(doomed: int, verb: str) -> None:
    """The other rank ends with an error that names the op, within the timeout."""
    pool = Pool(2, grace=3 * TIMEOUT)
    try:
        with pytest.raises(WorkerError) as found:
            pool.run(killed, doomed, verb)
    finally:
        pool.close()
    text = str(found.value)
    assert f"rank {doomed} died: killed by SIGKILL" in text and "CommError after" in text, text
    seconds = float(text.split("CommError after ")[1].split(" s")[0])
    assert seconds < TIMEOUT + 5
    assert any(op in text for op in ("send", "receive")), text
