"""Real gloo processes that are kept alive across tests.

A pool of ``world`` processes runs a function on every rank and returns what each rank returned. The processes
come from a fork server that has imported torch once: measured on two cores, four of them start in 0.05 s (1.3
s the first time), against 8 to 10 s when each is spawned. Idle ranks block in a read, so they cost no CPU.
Nothing here is mocked: ranks meet through a file and talk over gloo on the loopback interface.

Any failure ends the pool, since its ranks may be out of step; the next run starts a fresh one.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch", "torch.distributed", "torch._dynamo", "torch._decomp.decompositions_for_jvp"),
    *("optree", "hypothesis", "pytest", "fshard", "fshard.played.virtual"),
]
"""What every rank would import. Fake tensors pull in torch._dynamo, which alone takes 1.3 s, and backwards the rest."""
RARELY = 20_000, 10, 50
"""How often ranks look for garbage: tests leave little of it behind."""
GLOO_TIMEOUT = 30.0
"""Seconds that a rank waits in a collective for its peers."""
GRACE = 3.0
"""Seconds that the other ranks get to finish once one has failed, where nobody asks what they say."""


class WorkerError(Exception):
    """A function failed on at least one rank. The message says for every rank what became of it."""


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    tasks: Connection
    life: Connection
    log: Path


class Pool:
    """``world`` gloo processes that run functions together. They start with the first run.

    Args:
        world: how many.
        grace: seconds that the others get to finish once one has failed.
    """

    def __init__(self, world: int, grace: float = GRACE) -> None:
        self.world, self.grace = world, grace
        self._folder: Path | None = None
        self._ranks: list[_Rank] = []

    def run(self, function: str | Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank and wait for all of them.

        Args:
            function: ``"package.module:name"``, or a top-level function of a module that ranks can import.
            *args: the same on every rank; pickled.
            timeout: seconds for all ranks together, without the start of the pool.

        Returns:
            What each rank returned, by rank.

        Raises:
            WorkerError: a rank raised, died or did not finish in time.
        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        task = pickle.dumps((name, args))
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                # A rank may have died since the last run: reading from it says how.
                with contextlib.suppress(BrokenPipeError):
                    rank.tasks.send_bytes(task)
            return self._collect(name, timeout)
        except BaseException:  # an interrupt too: ranks in the middle of a run are of no use to the next one
            self.kill()
            raise

    def close(self) -> None:
        """Let every rank leave its process group and end; kill those that do not within 5 seconds."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.tasks.send_bytes(b"")
        deadline = time.monotonic() + 5.0
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank at once and reap it. The next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.tasks.close()
            rank.life.close()
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def pids(self) -> list[int]:
        """The process ids by rank; empty while the pool is not started."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        folder = self._folder = Path(tempfile.mkdtemp(prefix="fshard-pool-"))
        for number in range(self.world):
            tasks, their_tasks = context.Pipe()
            their_life, life = context.Pipe(duplex=False)
            log = folder / f"rank{number}.log"
            args = (number, self.world, folder, their_tasks, their_life)
            process = context.Process(target=_serve, args=args, name=f"rank {number} of {self.world}", daemon=True)
            process.start()
            their_tasks.close()
            their_life.close()
            self._ranks.append(_Rank(process, tasks, life, log))
        self._collect("start of the pool", GLOO_TIMEOUT + 10.0)

    def _collect(self, name: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        began = time.monotonic()
        deadline = began + timeout
        while len(results) + len(failed) < self.world:
            open_ = {rank.tasks: i for i, rank in enumerate(self._ranks) if i not in results and i not in failed}
            ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                number = open_[connection]  # type: ignore[index]  # wait() returns what it was given
                ok, value = self._receive(number)
                (results if ok else failed)[number] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + self.grace)
        if len(results) == self.world:
            return [results[number] for number in range(self.world)]
        raise WorkerError(self._report(name, results, failed, time.monotonic() - began))

    def _receive(self, number: int) -> tuple[bool, Any]:
        rank = self._ranks[number]
        try:
            ok, value = pickle.loads(rank.tasks.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(5.0)
            return False, f"died: {_cause(rank.process.exitcode)}\n{_read(rank.log)}"
        return ok, value if ok else f"raised\n{value}"

    def _report(self, name: str, results: dict[int, Any], failed: dict[int, str], seconds: float) -> str:
        stuck = [i for i in range(self.world) if i not in results and i not in failed]
        stacks = self._stacks(stuck)
        out = [f"{name} on {self.world} ranks: failed on {sorted(failed)}, still running on {stuck}"]
        out += [f"rank {number} {text}" for number, text in sorted(failed.items())]
        out += [f"rank {number} still running after {seconds:.1f} s\n{stacks[number]}" for number in stuck]
        if results:
            out.append(f"ranks {sorted(results)} returned")
        return "\n".join(out)

    def _stacks(self, numbers: list[int]) -> dict[int, str]:
        """Where these ranks are. faulthandler needs no GIL, so its dump shows a rank stuck in C too."""
        for number in numbers:
            with contextlib.suppress(OSError):
                os.kill(self._ranks[number].process.pid or 0, signal.SIGUSR1)
        if numbers:
            time.sleep(0.3)
        return {number: _read(self._ranks[number].log) for number in numbers}


class Pools:
    """At most one pool of each size."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        """The pool of this many ranks."""
        return self._pools.setdefault(world, Pool(world))

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()


def await_files(paths: Sequence[str], seconds: float) -> None:
    """Wait until these files have something in them, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(os.path.exists(path) and os.path.getsize(path) for path in paths):
            return
        time.sleep(0.05)


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _read(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip() or "(it left no stack)"
    except OSError as error:
        return f"(no stack: {error})"


def _serve(rank: int, world: int, folder: Path, tasks: Connection, life: Connection) -> None:
    """What a rank does: meet the others, then run tasks until the parent hangs up."""
    # Ctrl-C reaches the whole process group; the parent ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what the fork server imported is no garbage, and each collection would look at all of it
    gc.set_threshold(*RARELY)
    threading.Thread(target=_outlive_nobody, args=(life,), daemon=True, name="lifeline").start()
    with open(folder / f"rank{rank}.log", "w") as log:
        faulthandler.enable(file=log)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        tasks.send_bytes(_attempt(pickle.dumps(("tests.shared.workers:_join", (rank, world, folder)))))
        while True:
            try:
                task = tasks.recv_bytes()
            except EOFError:
                break
            if not task:
                break
            tasks.send_bytes(_attempt(task))
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


def _join(rank: int, world: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GLOO_TIMEOUT),
    )


def _attempt(task: bytes) -> bytes:
    try:
        name, args = pickle.loads(task)
        module, _, function = name.partition(":")
        return pickle.dumps((True, getattr(importlib.import_module(module), function)(*args)))
    except BaseException:  # SystemExit too: a rank that leaves must say so
        return pickle.dumps((False, traceback.format_exc()))


def _outlive_nobody(life: Connection) -> None:
    """End this rank when the parent is gone, however it went."""
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)
