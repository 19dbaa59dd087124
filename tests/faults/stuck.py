"""Ranks that are frozen, links that are cut one way, stores that are lost: how soon the others get a named error.

A profiler brings the fault about at the call of a function, as in ``job.py``. Every rank that can still run must raise
an error of the library within the timeout and five seconds, whatever does not answer any more. The error names the
folder of the records of what ranks did before, unless only the store is gone.
"""

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from benchmarks.lab import DEVICE, Lab, obstacle
from tests.faults.program import Fault, batch, make_loss, start
from tests.shared.workers import PRELOAD

TIMEOUT, GRACE = 5.0, 5.0
"""Seconds that ranks wait for each other, and how much later their errors may come."""

NEW_NETWORK = 0x40000000
"""The flag by which ``setns`` knows a network namespace."""


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        where: the end of a source file's name, a function (of C where there is no file), and at which of its calls.
        rank: the rank that it befalls.
        how: ``"stop"`` freezes it, ``"out"`` cuts the way from it to the others, ``"in"`` from the others to it,
            ``"down"`` both, ``"none"`` leaves the rank as it is.
        gloo: whether ranks talk over gloo; cut links are links of gloo.
        store: what the store, in a process of its own, gets with it: ``"stop"`` or ``"kill"``.
        step: from which step on calls count; 0 for the start.
        world: the ranks.
        timeout: seconds that ranks wait for each other.
    """

    where: tuple[str, str, int]
    rank: int = 0
    how: str = "stop"
    gloo: bool = False
    store: str = ""
    step: int = 3
    world: int = 3
    timeout: float = TIMEOUT

    @property
    def cuts(self) -> bool:
        """Whether each rank has a network of its own."""
        return self.how in ("out", "in", "down")


@dataclass
class Ended:
    """What became of a rank: what it raised, when after the fault, and when its process had ended."""

    error: str = ""
    raised: float = -1.0
    gone: float = -1.0


class Trigger:
    """Brings the fault about, once, at a call."""

    def __init__(self, case: Case, marker: Path, store: int, names: list[str]) -> None:
        self.case, self.marker, self.store, self.names = case, marker, store, names
        self.armed, self.count = case.step == 0, case.where[2]

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """A call, in any thread."""
        file, function, _ = self.case.where
        if not self.armed or event != ("call" if file else "c_call"):
            return
        name = frame.f_code.co_name if file else getattr(argument, "__name__", "")
        if name == function and frame.f_code.co_filename.endswith(file or ".py"):
            self.count -= 1
            if self.count == 0:
                self._happen()

    def _happen(self) -> None:
        if self.store and self.case.store:
            os.kill(self.store, signal.SIGSTOP if self.case.store == "stop" else signal.SIGKILL)
        if self.case.cuts:
            cut(self.names, self.case.rank, self.case.how)
        self.marker.write_text(repr(time.monotonic()))
        if self.case.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def cut(names: list[str], rank: int, how: str) -> None:
    """Cut a rank's link. One way: whoever sends has a wrong hardware address for the other end, so that all is lost."""
    if how == "down":
        subprocess.run(["ip", "-n", names[rank], "link", "set", DEVICE, "down"], check=True)
        return
    for other in range(len(names)):
        if other != rank:
            sender, receiver = (rank, other) if how == "out" else (other, rank)
            address, nobody = f"10.0.0.{receiver + 1}", "02:00:00:00:00:99"
            wrong = ["neigh", "replace", address, "lladdr", nobody, "dev", DEVICE, "nud", "permanent"]
            subprocess.run(["ip", "-n", names[sender], *wrong], check=True)


def run(case: Case, limit: float = 90.0) -> list[Ended]:
    """Run a case to its end. No process is left; a frozen one is killed.

    Returns:
        What became of each rank; of a frozen one, nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with contextlib.ExitStack() as stack:
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fshard-stuck-")))
        lab = stack.enter_context(Lab(case.world, "1gbit")) if case.cuts else None
        names = lab.names if lab else []
        address = lab.environment() if lab else {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        address.setdefault("MASTER_PORT", str(_free_port()))
        store = stack.enter_context(_store(int(address["MASTER_PORT"]))) if case.store else 0
        ranks: list[Any] = []
        for rank in range(case.world):
            args = (rank, case, meeting, address, store, names)
            ranks.append(context.Process(target=_main, args=args, daemon=True))
        try:
            for process in ranks:
                process.start()
            gone = _wait(ranks, [r for r in range(case.world) if case.how != "stop" or r != case.rank], limit)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [_read(meeting, rank, gone) for rank in range(case.world)]


def _wait(ranks: list[Any], survivors: list[int], limit: float) -> dict[int, float]:
    """When the processes of the survivors ended."""
    gone: dict[int, float] = {}
    deadline = time.monotonic() + limit
    while len(gone) < len(survivors) and time.monotonic() < deadline:
        left = {ranks[rank].sentinel: rank for rank in survivors if rank not in gone}
        for sentinel in wait(list(left), max(0.0, deadline - time.monotonic())):
            gone[left[sentinel]] = time.monotonic()  # type: ignore[index]
    return gone


def _read(meeting: Path, rank: int, gone: dict[int, float]) -> Ended:
    marker, report = meeting / "fault", meeting / f"end{rank}"
    began = float(marker.read_text()) if marker.exists() else time.monotonic()
    error, when = pickle.loads(report.read_bytes()) if report.exists() else ("", began - 1)
    return Ended(error, when - began, gone[rank] - began if rank in gone else -1.0)


def _main(rank: int, case: Case, meeting: Path, address: dict[str, str], store: int, names: list[str]) -> None:
    if names:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{names[rank]}") as space:
            assert libc.setns(space.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    torch.set_num_threads(1)
    tempfile.tempdir = str(meeting)  # of records
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(case.world))
    if store:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    trigger = Trigger(case, meeting / "fault", store, names) if rank == case.rank else None
    if trigger is not None:
        threading.setprofile(trigger)
        sys.setprofile(trigger)
    error = ""
    try:
        _train(case, trigger, str(meeting / "run"))
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    (meeting / "part").mkdir(exist_ok=True)
    part = meeting / "part" / f"{rank}"
    part.write_bytes(pickle.dumps((error, time.monotonic())))
    part.rename(meeting / f"end{rank}")


def _train(case: Case, trigger: Trigger | None, folder: str) -> None:
    with fs.make_mesh((-1,), ("shard",), timeout=case.timeout, shared_memory=not case.gloo) as mesh:
        plan, opt, state = start(mesh)
        step = fs.make_train_step(make_loss(Fault()), opt, plan)
        evaluate = fs.make_eval_step(lambda params, rows: make_loss(Fault())(params, rows)[0], plan)
        with fs.Checkpointer(folder, keep=2) as checkpoints:
            for number in range(5):
                if trigger is not None and number + 1 >= case.step:
                    trigger.armed = True
                state, _ = step(state, batch(number, mesh.rank))
                evaluate(state, batch(number, mesh.rank))
                fs.unshard(state.params, plan)
                checkpoints.save(state)
                mesh.transport.communicator(f"new {number}", mesh.axis_names)


@contextlib.contextmanager
def _store(port: int) -> Iterator[int]:
    """A store in a process of its own, as torchrun's agent has it: its process id."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


def _serve(port: int) -> None:
    import torch.distributed as dist

    host = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    while host is not None:
        time.sleep(1)


def _free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


@dataclass
class Row:
    """One line of the table: a fault, how often it was tried, how many ranks survived it, and the slowest error."""

    name: str
    cases: int = 0
    survivors: int = 0
    seconds: float = 0.0
    problems: list[str] | None = None

    def take(self, case: Case, ends: list[Ended]) -> None:
        """Count the ends of a case."""
        self.cases += 1
        lost = "store" if case.how == "none" else f"rank {case.rank}"
        named = lost if not case.cuts and case.step else ""
        for rank, end in enumerate(ends):
            if case.how == "stop" and rank == case.rank:
                continue
            self.survivors += 1
            self.seconds = max(self.seconds, end.raised)
            known = end.error.startswith(("CommError", "PeerError"))
            recorded = not case.step or case.store == "kill" or "fshard trace" in end.error
            if (
                not (known and recorded)
                or named not in end.error
                or not 0 <= end.raised <= case.timeout + GRACE
                or end.gone < 0
            ):
                told = f"rank {rank} raised after {end.raised:.1f} s, ended after {end.gone:.1f} s: {end.error!r}"
                self.problems = [*(self.problems or []), f"{self.name}, {case}: {told}"]


STEP = {
    "handshake": ("runtime/steps/handshake.py", "agree", 1),
    "forward": ("runtime/engine/engine.py", "call", 2),
    "gather": ("runtime/execution/actions.py", "_gather", 2),
    "wait for a gather": ("runtime/execution/actions.py", "_end", 2),
    "backward": ("runtime/engine/engine.py", "enter_backward", 2),
    "reduce": ("runtime/execution/actions.py", "_reduce", 1),
    "collect": ("runtime/execution/actions.py", "_reduced", 1),
    "update": ("runtime/execution/pending_update.py", "apply", 1),
    "consensus": ("runtime/steps/consensus.py", "exchange_row", 1),
    "unshard": ("state/init.py", "unshard", 1),
    "save: it begins": ("checkpoint/checkpointer.py", "_check", 1),
    "save: write": ("checkpoint/write.py", "write_files", 1),
    "save: ranks meet": ("checkpoint/checkpointer.py", "_prepare", 1),
    "a new communicator": ("comm/processes.py", "_made", 1),
    "links of a new communicator": ("comm/links.py", "open", 1),
}
"""Where a rank is frozen, from the third step on."""

START = {
    "joining": ("comm/joining.py", "_init", 1),
    "the first communicator": ("comm/processes.py", "_base", 1),
    "links": ("comm/links.py", "open", 1),
    "the second communicator": ("comm/processes.py", "_made", 2),
}
"""Where a rank is frozen before the first step."""

CUTS = {"one way, from it to the others": "out", "one way, from the others to it": "in", "both ways": "down"}


def rows(quick: bool = False) -> Iterator[Row]:
    """All cases; one of each kind if it is to be quick."""

    def cases(name: str, *given: Case) -> Row:
        row = Row(name)
        for case in given[:1] if quick else given:
            row.take(case, run(case))
        return row

    for rank, who in ((0, "rank 0, which has the store,"), (1, "another rank")):
        for name, where in STEP.items():
            both = (Case(where, rank), *([Case(where, rank, gloo=True)] if "links" not in name else []))
            yield cases(f"{who} frozen: {name}", *both)
        yield cases(f"{who} frozen: start", *(Case(where, rank, step=0) for where in START.values()))
    handshake, consensus, made = STEP["handshake"], STEP["consensus"], STEP["a new communicator"]
    yield cases(
        "store and a rank frozen",
        *(Case(at, 1, store="stop", gloo=gloo) for at in (handshake, consensus) for gloo in (False, True)),
    )
    for how, done in (("stop", "frozen"), ("kill", "killed")):
        # Over gloo: links of shared memory are made without the store.
        asked = [Case(made, rank, "none", True, how) for rank in (0, 1)]
        yield cases(f"store {done}: a new communicator", *asked)
    named = ("comm/start.py", "start_name", 1)
    yield cases("store frozen: start", *(Case(named, r, "none", store="stop", step=0) for r in (0, 1)))
    if why := obstacle():
        yield Row(f"links that are cut: skipped, {why}")
        return
    for name, how in CUTS.items():
        for rank, who in ((0, "rank 0, which has the store"), (1, "another rank")):
            places = [STEP[at] for at in ("handshake", "wait for a gather", "reduce", "consensus", "save: ranks meet")]
            yield cases(f"link of {who}, cut {name}", *(Case(at, rank, how, gloo=True) for at in places))


def table(found: list[Row]) -> str:
    """The table, in Markdown."""
    lines = [f"| fault (timeout {TIMEOUT:g} s) | cases | survivors | slowest error |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.cases} | {row.survivors} | {row.seconds:.1f} s |" for row in found]
    cases, survivors = sum(row.cases for row in found), sum(row.survivors for row in found)
    slowest = max(row.seconds for row in found)
    return "\n".join([*lines, f"| **all** | **{cases}** | **{survivors}** | **{slowest:.1f} s** |"])


def written(page: str, name: str, text: str) -> str:
    """A page with a table between its marks."""
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    return f"{before}{begin}{text}\n{end}{after}"


def main() -> int:
    """Run all of it: ``--write tests/faults/README.md`` puts the table there, between its marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="put the table into this page, between its marks")
    given = parser.parse_args()
    found = []
    for row in rows():
        print(f"{row.name}: {row.cases} cases, {row.seconds:.1f} s", *(row.problems or []), sep="\n  ", flush=True)
        found.append(row)
    problems = any(row.problems for row in found)
    if given.write is not None and not problems:
        given.write.write_text(written(given.write.read_text(), "waits", table(found)))
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
