"""Liveness notes: which ranks have come, and whether those of this host still live, before any connection joins them.

Once ranks are joined by a communicator, the kernel closes the connections of one that dies. Before that they wait for
each other in the store of the job, which knows of no death. So each rank leaves a note of its process there, and those
that wait look whether the processes of their own host still run.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fshard.errors import CommError
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.links import host_key

PATIENCE = 1.0
"""Seconds for an answer of the store."""

MOST = 64
"""Ranks that one looks for at most, where the environment does not tell which are on its host."""


class Alive:
    """The notes of a start.

    Args:
        store: that all ranks see.
        rank: this one.
        world: how many there are.

    Attributes:
        unread: ranks of this host, perhaps, whose notes have not been seen.
        processes: what identifies the processes of ranks of this host.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.unread = [other for other in near(rank, world) if other != rank]
        self.processes: dict[int, str] = {}
        self.store: Any = None
        with suppress(Exception):  # without a store, nobody is looked for
            self.store = store.clone()  # a store that one thread waits in answers no other
            store.set(_key(rank), f"{_host()} {os.getpid()} {born(os.getpid())}")

    def look(self) -> None:
        """Look whether a rank of this host that had come has ended.

        Raises:
            CommError: with its number.
        """
        with suppress(Exception):
            bounded(self._read, PATIENCE, "reading the notes of ranks")
        for rank, process in self.processes.items():
            pid, _, begin = process.partition(" ")
            if born(int(pid)) != begin:
                raise CommError(
                    f"rank {rank} has ended (process {pid} of this host) before the ranks were joined: see its log"
                )

    def missing(self) -> list[int]:
        """The ranks that have not come; none where the store does not answer."""

        def absent() -> list[int]:
            return [rank for rank in range(self.world) if not self.store.check([_key(rank)])]

        try:
            return bounded(absent, PATIENCE, "looking for ranks") if self.store is not None else []
        except Exception:
            return []

    def _read(self) -> None:
        for rank in [*self.unread] if self.store is not None else ():
            if self.store.check([_key(rank)]):
                host, _, process = self.store.get(_key(rank)).decode().rpartition(" | ")
                self.unread.remove(rank)
                if host and f"{host} |" == _host():
                    self.processes[rank] = process


def near(rank: int, world: int) -> Sequence[int]:
    """The ranks that may be on this rank's host: launchers give those of a host numbers in a row."""
    local, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and size.isdecimal() and 0 <= rank - int(local) <= world - int(size):
        return range(rank - int(local), rank - int(local) + int(size))
    return range(world if world <= MOST else 0)


def born(pid: int) -> str:
    """Say when a process began, in ticks since the start of the system; empty if it has ended, or nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19] if fields[0] not in ("Z", "X") else ""


def _host() -> str:
    """Equal on ranks that see each other's processes."""
    try:
        return f"{host_key()} {os.readlink('/proc/self/ns/pid')} |"
    except OSError:
        return ""


def _key(rank: int) -> str:
    return f"fshard/came/{rank}"
