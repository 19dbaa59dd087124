"""The process between ``fs.launch`` and its ranks: it imports PyTorch once, forks the ranks, and ends with its caller.

It runs nothing itself, so no thread is alive when it forks. Its standard input is a pipe that the caller holds open:
when the caller is gone, for whatever reason, the pipe ends, and so do all ranks. It leads a session of its own, and
ends by killing all of it.
"""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

from fshard.launching.job import JOB, LAUNCHED, STATUS, STORE, Setting, log_of, unpacked, write_error, write_result
from fshard.runtime.comm.joining import join_by_file

GRACE = 5.0
"""Seconds that the other ranks get to report, once one has failed."""

POLL = 0.05


def main(text: str) -> None:
    """Run a launch to its end."""
    setting = Setting(**json.loads(text))
    ranks: dict[int, int] = {}
    try:
        for rank in range(setting.ranks):
            pid = os.fork()
            if pid == 0:
                _be(setting, rank)
            ranks[pid] = rank
        for fd in (1, 2):  # the pipes to the caller end with rank 0
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        statuses = _watch(ranks)
        Path(setting.folder, STATUS).write_text(json.dumps(statuses))
    except BaseException:
        traceback.print_exc()  # this process ends before Python would do so
        raise
    finally:
        os.killpg(0, signal.SIGKILL)  # what ranks have started and not ended, and this process


def _watch(ranks: dict[int, int]) -> dict[int, int | None]:
    """The exit status of each rank, once all have ended; None for those that were ended here.

    If one fails, the others get some seconds.
    """
    statuses: dict[int, int | None] = {}
    killed: set[int] = set()
    deadline = float("inf")
    while len(statuses) < len(ranks):
        readable, _, _ = select.select([0], [], [], POLL)
        if (readable and not os.read(0, 1)) or time.monotonic() > deadline:
            for pid, rank in ranks.items():
                if rank not in statuses:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(rank)
            deadline = float("inf")
        for pid, rank in ranks.items():
            if rank in statuses or not (ended := os.waitpid(pid, os.WNOHANG))[0]:
                continue
            status = os.waitstatus_to_exitcode(ended[1])
            statuses[rank] = None if rank in killed else status
            if status:
                deadline = min(deadline, time.monotonic() + GRACE)
    return statuses


def _be(setting: Setting, rank: int) -> None:
    """Be a rank: run the function, leave its outcome, and end the process."""
    status, folder = 1, Path(setting.folder)
    try:
        _enter(setting, rank)
        try:
            fn, args, kwargs = unpacked((folder / JOB).read_bytes())
            join_by_file(str(folder / STORE), rank, setting.ranks)
            write_result(folder, rank, fn(*args, **kwargs))
            status = 0
        except BaseException as error:
            write_error(folder, rank, error)
    finally:  # nothing may be raised here: it would be the nursery's
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # a function may have closed it
                stream.flush()
        os._exit(status)


def _enter(setting: Setting, rank: int) -> None:
    """Take the place of a rank: environment, folder, imports, output, random numbers."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(setting.ranks),
        "LOCAL_WORLD_SIZE": str(setting.ranks),
        LAUNCHED: "1",
    }
    os.chdir(setting.cwd)
    sys.path[:] = setting.path
    sys.argv = [""]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if rank:  # kept for the report, should it die
        log = os.open(log_of(setting.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _writer(fd: int) -> TextIO:
    """A text stream whose every write goes out at once, as a progress bar needs it."""
    return open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
