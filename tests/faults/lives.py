"""Ranks that end before they are joined, forked children that outlive or disturb them, meshes that nobody closes."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard.runtime.comm import joining
from tests.faults import forks
from tests.faults.program import Fault, batch, make_loss, start
from tests.faults.stuck import Row, _free_port
from tests.shared.workers import PRELOAD, Pool

GRACE = 60.0
"""Seconds in which a process must have ended after its error, on a busy machine; one second where it is not."""

PLACES = {
    "asking who is there": "_agreed",
    "joining": "_init",
    "before the first step": "step",
}
"""Where a rank ends: a function of ``fshard.runtime.comm.joining``, or ``step`` after ``make_mesh``."""


@dataclass(frozen=True)
class Survivor:
    """What became of a rank that another one has left.

    Attributes:
        status: of its process.
        error: what it raised.
        raised: seconds from the other's death to this error.
        lived: seconds from this error to the end of its process.
        printed: to its standard error.
    """

    status: int | None
    error: str
    raised: float
    lived: float
    printed: str


def rank_of(rank: int, world: int, victim: int, where: str, port: int, folder: str) -> None:
    """A rank of a job that loses another one, and whose interpreter ends as that of a program does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    torch.set_num_threads(1)

    def come(ask: Any = joining._agreed) -> Any:
        def asks(*given: Any) -> Any:
            Path(folder, f"came{rank}").touch()
            return ask(*given)

        return asks

    def die(*given: object) -> Any:
        deadline = time.monotonic() + GRACE / 2  # whoever comes after the store is gone can only wait for it
        while len(list(Path(folder).glob("came*"))) < world - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        Path(folder, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank != victim:
        joining._agreed = come()
    elif where != "step":
        setattr(joining, where, die)
    try:
        mesh = fs.make_mesh((-1,), ("data",), timeout=30.0)
        if rank == victim:
            die()
        while True:
            fs.collectives.psum(torch.ones(2), "data", mesh=mesh)
    except fs.errors.CommError as error:
        sys.last_value = error
        Path(folder, f"raised{rank}").write_text(f"{time.monotonic()} {error}")
    ctypes.pythonapi.Py_Exit(1)


def survivors(world: int, victim: int, where: str, folder: Path) -> list[Survivor]:
    """What becomes of the others when a rank is killed at one of ``PLACES``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port()
    ranks = [
        context.Process(target=rank_of, args=(rank, world, victim, where, port, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = []
    for rank, process in enumerate(ranks):
        process.join(GRACE)
        ended = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            raised, _, error = (folder / f"raised{rank}").read_text().partition(" ")
            died = float((folder / "died").read_text())
            printed = (folder / f"log{rank}").read_text()
            found.append(Survivor(process.exitcode, error, float(raised) - died, ended - float(raised), printed))
        process.kill()
    return found


def left_behind(cycles: int, shared_memory: bool) -> tuple[int, int]:
    """Threads and descriptors that meshes leave which are dropped after a step, without ``close``."""

    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def job() -> None:
        mesh = fs.make_mesh((-1,), ("shard",), timeout=20.0, shared_memory=shared_memory)
        plan, opt, state = start(mesh)
        fs.make_train_step(make_loss(Fault()), opt, plan)(state, batch(1, mesh.rank))

    job()
    before = counts()
    for _ in range(cycles):
        job()
    deadline = time.monotonic() + GRACE / 4  # threads that a mesh had end on their own time
    while (after := counts()) > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return after[0] - before[0], after[1] - before[1]


def rows() -> Iterator[Row]:
    """All cases."""
    for name, where in PLACES.items():
        row = Row(f"killed before ranks are joined: {name}")
        for victim in range(3):
            with tempfile.TemporaryDirectory() as folder:
                _count(row, victim, survivors(3, victim, where, Path(folder)))
        yield row
    pool = Pool(2)
    try:
        yield _calls(pool)
        row = Row("a mesh that is dropped without being closed")
        for shared_memory in (True, False):
            row.cases += 1
            for rank, (threads, descriptors) in enumerate(pool.run(left_behind, 3, shared_memory)):
                row.survivors += 1
                if threads > 0 or descriptors > 0:
                    told = f"rank {rank} has {threads} threads and {descriptors} descriptors more"
                    row.problems = [*(row.problems or []), f"{row.name}, shared_memory={shared_memory}: {told}"]
        yield row
    finally:
        pool.close()


def _count(row: Row, victim: int, ends: list[Survivor]) -> None:
    row.cases += 1
    problems = [] if len(ends) == 2 else [f"{row.name}: {2 - len(ends)} of 2 survivors did not raise"]
    for end in ends:
        row.survivors += 1
        row.seconds = max(row.seconds, end.raised)
        if end.status != 1 or f"rank {victim}" not in end.error or end.raised > GRACE / 6 or end.lived > GRACE / 6:
            problems.append(f"{row.name}: {end}")
    if problems:
        row.problems = [*(row.problems or []), *problems]


def _calls(pool: Pool) -> Row:
    """Calls in forked children of ranks that go on."""
    row = Row("a forked child that steps, saves, restores, or leaves the mesh")
    for shared_memory in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            right = pool.run(forks.undisturbed, f"{folder}/right", shared_memory)
            seed = random.randrange(1 << 20)
            for rank, (told, losses) in enumerate(pool.run(forks.calls_in_children, folder, shared_memory, seed)):
                row.survivors += 1
                row.cases += len(told) if rank == 0 else 0
                if losses != right[0]:
                    row.problems = [*(row.problems or []), f"{row.name}, seed {seed}: losses {losses}, not {right[0]}"]
    return row


def main() -> int:
    """Run all of it."""
    found = list(rows())
    for row in found:
        print(f"{row.name}: {row.cases} cases, {row.survivors} survivors, {row.seconds:.1f} s", *(row.problems or []))
    return int(any(row.problems for row in found))


if __name__ == "__main__":
    sys.exit(main())
