"""Files of records: the begin of each, and the ring that is mapped into memory."""

import json
import mmap
import os
import time
from pathlib import Path

from fshard.errors import PlanError
from fshard.runtime.flight.rank_records import FORMAT, HEADER, RECORD, SLOTS, file_name, schedule_name
from fshard.schedule.schedule import Schedule

VARIABLE = "FSHARD_RECORD"
"""The environment variable that names the folder of records."""

REASON = 300
"""Characters of the reason that a record has: a header must hold them, at up to twelve bytes each."""


class MappedFile:
    """A ring of the ops that a rank came to, in a file that is mapped into memory.

    Args:
        folder: where it is kept; made if it is not there.
        ranks: how many there are.

    Attributes:
        run: the number of the run.
        schedule: the number of its schedule.
        place: where the next entry goes.

    Raises:
        PlanError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.run = self.schedule = 0
        self.place, self.end = HEADER, HEADER + SLOTS * RECORD.size
        self.known: set[int] = set()
        path = folder / file_name(rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = unfinished_of(path)
            unfinished.write_bytes(header(rank, ranks) + bytes(SLOTS * RECORD.size))
            with unfinished.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0)
            unfinished.replace(path)
        except OSError as error:
            raise PlanError(f"{VARIABLE}={folder}: no record can be kept there: {error}") from error
        self.pack, self.clock = RECORD.pack_into, time.perf_counter

    def begin(self, run: int, schedule: Schedule) -> None:
        """A run of a schedule begins."""
        self.run, self.schedule = run, number_of(schedule)
        if self.schedule not in self.known:
            self.known.add(self.schedule)
            replace(self.folder / schedule_name(self.rank, self.schedule), str(schedule).encode())

    def note(self, op: int) -> None:
        """The rank comes to an op."""
        place = self.place
        self.pack(self.memory, place, self.clock(), self.run, op, self.schedule)
        place += RECORD.size
        self.place = place if place < self.end else HEADER

    def tell(self, reason: str, lost: bool) -> None:
        """Say in the file why the rank cannot go on, or where it has been for long; empty for nothing of that."""
        written = time.perf_counter() if reason else 0.0
        self.memory[:HEADER] = header(self.rank, self.ranks, reason, written, lost)


def header(rank: int, ranks: int, reason: str = "", written: float = 0.0, lost: bool = False) -> bytes:
    """The begin of a record: a line of JSON."""
    clock = time.time() - time.perf_counter()
    told = {"reason": reason.partition("\n")[0][:REASON], "written": written, "lost": lost}
    head = {"format": FORMAT, "rank": rank, "ranks": ranks, "clock": clock, "pid": os.getpid(), **told}
    return json.dumps(head).encode().ljust(HEADER)


def number_of(schedule: Schedule) -> int:
    """The number of a schedule, from its hash."""
    return int(schedule.hash[:15], 16)


def unfinished_of(path: Path) -> Path:
    """The name of a file until all of it is there."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def replace(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all."""
    unfinished = unfinished_of(path)
    unfinished.write_bytes(content)
    unfinished.replace(path)
