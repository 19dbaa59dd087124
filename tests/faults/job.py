"""A training job as one process a rank, which can be killed at any function of the library.

Nothing in the library knows of it: a profiler, as debuggers have it, sees every call of the process, and ends it there.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from tests.faults.program import Fault, batch, make_loss, snapshot, start
from tests.shared.workers import PRELOAD

TIMEOUT = 40.0
"""Seconds that ranks wait for each other."""


@dataclass
class Kill:
    """Where to end a rank, by a signal that no process can handle.

    Attributes:
        rank: which one.
        file: the end of the source file's name; empty for functions written in C.
        function: its name.
        count: at which of its calls, from that step on.
        step: the first step in which it counts.
        child: whether it has forked a child by then, which lives on.
    """

    rank: int
    file: str
    function: str
    count: int = 1
    step: int = 3
    armed: bool = False
    child: bool = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """A call, in any thread."""
        if not self.armed:
            return
        if self.file:
            code = frame.f_code
            hit = event == "call" and code.co_name == self.function and code.co_filename.endswith(self.file)
        else:
            hit = event == "c_call" and getattr(argument, "__name__", "") == self.function
        if hit:
            self.count -= 1
            if self.count == 0:
                if self.child and os.fork() == 0:
                    time.sleep(TIMEOUT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Run:
    """What a job is given.

    Attributes:
        folder: its checkpoints.
        world: its ranks.
        steps: where it ends.
        every: steps from one checkpoint to the next.
        kill: which rank ends before, and where.
        sizes: of its mesh.
        async_: whether it saves while the next steps run.
        gloo: whether ranks talk over gloo.
    """

    folder: str
    world: int = 2
    steps: int = 6
    every: int = 1
    kill: Kill | None = None
    async_: bool = False
    gloo: bool = False


@dataclass
class End:
    """What became of a rank.

    Attributes:
        code: its exit code, negative for a signal.
        seconds: from the first rank's end to its own.
        losses: of the steps that it made, by number.
        whole: its last state.
        error: what it raised.
    """

    code: int = 0
    seconds: float = 0.0
    losses: dict[int, float] | None = None
    whole: dict[str, Any] | None = None
    error: str = ""


def run(job: Run, timeout: float = 120.0) -> list[End]:
    """Run a job to its end, whatever that is. No process is left.

    Raises:
        AssertionError: a rank was still there after the timeout.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="fshard-job-") as meeting:
        ranks = [context.Process(target=_main, args=(rank, job, meeting), daemon=True) for rank in range(job.world)]
        ends = [End() for _ in ranks]
        try:
            for process in ranks:
                process.start()
            left, first = {process.sentinel: rank for rank, process in enumerate(ranks)}, 0.0
            deadline = time.monotonic() + timeout
            while left:
                done = wait(list(left), max(0.0, deadline - time.monotonic()))
                assert done, f"ranks {sorted(left.values())} are still there after {timeout:g} s"
                first = first or time.monotonic()
                for sentinel in done:
                    ends[left.pop(sentinel)].seconds = time.monotonic() - first  # type: ignore[index]
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        for rank, (end, process) in enumerate(zip(ends, ranks, strict=True)):
            end.code = process.exitcode or 0
            report = Path(meeting, f"end{rank}")
            if report.exists():
                end.losses, end.whole, end.error = pickle.loads(report.read_bytes())
            process.close()
    return ends


def _main(rank: int, job: Run, meeting: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}/rendezvous", rank=rank, world_size=job.world)
    kill = job.kill if job.kill is not None and job.kill.rank == rank else None
    if kill is not None:
        threading.setprofile(kill)
        sys.setprofile(kill)
    losses: dict[int, float] = {}
    whole, error = None, ""
    try:
        whole = _train(job, kill, losses)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    Path(meeting, f"end{rank}").write_bytes(pickle.dumps((losses, whole, error)))
    sys.stdout.flush()
    os._exit(1 if error else 0)


def _train(job: Run, kill: Kill | None, losses: dict[int, float]) -> dict[str, Any]:
    mesh = fs.make_mesh((-1,), ("shard",), timeout=TIMEOUT, shared_memory=not job.gloo)
    plan, opt, _ = start(mesh)
    step = fs.make_train_step(make_loss(Fault()), opt, plan)
    state = None
    with fs.Checkpointer(job.folder, keep=2, every=job.every, async_=job.async_) as checkpoints:
        loop = fs.train_loop(
            step, lambda: start(mesh)[2], lambda n: batch(n, mesh.rank), steps=job.steps, checkpoints=checkpoints
        )
        for state, metrics in loop:
            losses[state.step] = metrics.loss.item()
            if kill is not None and state.step + 1 >= kill.step:
                kill.armed = True
    assert state is not None
    out = snapshot(state)
    del out["rng"]
    return out
