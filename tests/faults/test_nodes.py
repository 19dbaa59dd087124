"""Nodes that come and go: ``torchrun --nnodes 1:2``, with an agent of its own for each of two nodes on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.faults.nodes_job import loss, part
from tests.faults.program import start

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PATIENCE = 100.0
"""Seconds for each change of the job. The processes that take part are started anew in it."""

Rows = list[dict[str, Any]]


class Job:
    """A job of one rank a node.

    Args:
        folder: its files.
        more: of the environment.
    """

    def __init__(self, folder: Path, **more: str) -> None:
        self.folder, self.agents, self.lost = folder, dict[str, subprocess.Popen[bytes]](), 0
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.environment = {**os.environ, **own, **more}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def add(self, name: str) -> None:
        """A node comes."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        command += ["--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=job"]
        command += [f"--rdzv-endpoint=localhost:{self.port}", "--local-addr=127.0.0.1"]
        command += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"]
        with open(self.folder / f"{name}.txt", "wb") as log:
            self.agents[name] = subprocess.Popen(
                [*command, "-m", "tests.faults.nodes_job", str(self.folder)],
                env=self.environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose(self, name: str) -> None:
        """A node goes, with all of its processes at once."""
        everyone = [self.agents[name].pid, *self.ranks(name)]
        for pid in everyone:
            os.kill(pid, signal.SIGKILL)
        self.agents[name].wait()
        self.lost += 1

    def ranks(self, name: str) -> list[int]:
        """The processes that a node's agent has started."""
        pid = self.agents[name].pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def rows(self) -> Rows:
        """What all ranks have said, in order of time."""
        lines = [line for file in self.folder.glob("process.*") for line in file.read_text().split("\n")[:-1]]
        return sorted((dict(json.loads(line)) for line in lines), key=lambda row: float(row["time"]))

    def seen(self) -> set[int]:
        """All processes that have made a step."""
        return {int(row["pid"]) for row in self.rows()}

    def until(self, what: str, there: Callable[[Rows], bool]) -> int:
        """Wait until the ranks have come to something; returns the last step that any has made."""
        deadline = time.monotonic() + PATIENCE
        while not there(rows := self.rows()):
            ended = [name for name, agent in self.agents.items() if agent.poll() is not None and agent.returncode >= 0]
            assert time.monotonic() < deadline and not ended, f"{what} did not happen; ended: {ended}\n{self.texts()}"
            time.sleep(0.2)
        return max(int(row["step"]) for row in rows)

    def texts(self) -> str:
        """The end of what each node wrote."""
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.txt")))

    def close(self) -> None:
        """No process is left."""
        for agent in self.agents.values():
            try:
                ranks = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
            except OSError:
                ranks = []
            for pid in (agent.pid, *ranks):
                if agent.poll() is None or pid != agent.pid:
                    os.kill(pid, signal.SIGKILL)
            agent.wait()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job with no node yet."""
    made = Job(tmp_path, **request.param)
    try:
        yield made
    finally:
        made.close()


def beyond(rows: Rows, world: int, step: int, besides: set[int]) -> bool:
    """Whether processes other than these have made steps after this one, as many as are in such a world."""
    return len({row["pid"] for row in rows if row["world"] == world and row["step"] > step} - besides) == world


def as_one_rank(steps: int) -> dict[str, torch.Tensor]:
    """The parameters of a run on one rank that nothing happens to."""
    plan, opt, state = start(fs.make_mesh((1,), ("shard",)))
    step = fs.make_train_step(loss, opt, plan)
    for number in range(steps):
        state, _ = step(state, part(number, 0, 1))
    return dict(tree.paths(state.params))


def finish(job: Job, *names: str) -> Rows:
    """Let the job end, and compare its last checkpoint with an undisturbed run.

    No step may be missing, but one for each lost node: ranks may have saved it, and be stopped before they say so.
    """
    (job.folder / "enough").touch()
    for name in names:
        assert job.agents[name].wait(PATIENCE) == 0, job.texts()
    plan, opt, _ = start(fs.make_mesh((1,), ("shard",)))
    rows = job.rows()
    with fs.Checkpointer(job.folder / "run") as checkpoints:
        state = checkpoints.restore(plan, opt)
    told, made = {row["step"] for row in rows}, {*range(1, state.step + 1)}
    assert told <= made and len(made - told) <= job.lost, made - told
    for path, want in as_one_rank(state.step).items():
        torch.testing.assert_close(dict(tree.paths(state.params))[path], want, rtol=1e-3, atol=1e-4)
    return rows


STARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it a node that comes later waits for the address of a store that nobody tells it (PyTorch 2.13)."""


@pytest.mark.slow
@pytest.mark.parametrize("job", [STARTS], indirect=True)
def test_a_node_that_is_lost_and_one_that_joins(job: Job) -> None:
    job.add("first")  # it keeps the list of nodes
    job.until("one rank trains", lambda rows: beyond(rows, 1, 0, set()))
    job.add("second")
    both = job.until("a second node joins", lambda rows: beyond(rows, 2, 2, set()))
    seen = job.seen()
    job.lose("second")
    alone = job.until("the first one goes on alone", lambda rows: beyond(rows, 1, both, seen))
    seen = job.seen()
    job.add("third")
    job.until("a third node joins", lambda rows: beyond(rows, 2, alone, seen))
    worlds = [row["world"] for row in finish(job, "first", "third") if row["rank"] == 0]
    changes = [one for one, next_ in zip(worlds, [*worlds[1:], 0], strict=True) if one != next_]
    assert changes == [1, 2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("job", [{}, STARTS], ids=["one store", "a store a start"], indirect=True)
def test_a_rank_of_two_nodes_that_is_killed(job: Job) -> None:
    job.add("first")
    job.add("second")
    made, seen = job.until("two ranks train", lambda rows: beyond(rows, 2, 1, set())), job.seen()
    for name in ("second", "first", "second"):
        os.kill(job.ranks(name)[0], signal.SIGKILL)
        made = job.until("they train again", lambda rows: beyond(rows, 2, made, seen))  # noqa: B023
        seen = job.seen()
    finish(job, "first", "second")
