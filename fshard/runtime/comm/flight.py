"""The flight recorder: a ring of the ops that a rank came to, in a file that is mapped into memory.

What was written is in the file however the process ends: killed, stopped or stuck. A record is the time, the number of
the run, the number of the op in its schedule, and which schedule; texts of schedules lie beside it. ``fshard trace``
reads the files of all ranks.
"""

import json
import mmap
import os
import time
from pathlib import Path

from fshard.errors import PlanError
from fshard.schedule.flight import FORMAT, HEADER, RECORD, SLOTS, file_name, schedule_name
from fshard.schedule.schedule import Schedule

VARIABLE = "FSHARD_RECORD"
"""The environment variable that names the folder of records."""


class Flight:
    """The record of one rank.

    Args:
        folder: where it is kept; made if it is not there.
        rank: this rank.
        ranks: how many there are.

    Attributes:
        run: the number of runs so far.
        place: where the next entry goes.

    Raises:
        PlanError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.run = folder, rank, 0
        self.place, self.end = HEADER, HEADER + SLOTS * RECORD.size
        self.known: set[int] = set()
        clock = time.time() - time.perf_counter()
        head = json.dumps({"format": FORMAT, "rank": rank, "ranks": ranks, "clock": clock, "pid": os.getpid()})
        path = folder / file_name(rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            unfinished.write_bytes(head.encode().ljust(HEADER) + bytes(SLOTS * RECORD.size))
            with unfinished.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0)
            unfinished.replace(path)
        except OSError as error:
            raise PlanError(f"{VARIABLE}={folder}: no record can be kept there: {error}") from error
        self.pack, self.clock = RECORD.pack_into, time.perf_counter

    def begin(self, schedule: Schedule) -> int:
        """A run of a schedule begins; returns the schedule's number."""
        number = int(schedule.hash[:15], 16)
        if number not in self.known:
            self.known.add(number)
            path = self.folder / schedule_name(self.rank, number)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            unfinished.write_text(str(schedule))
            unfinished.replace(path)
        self.run += 1
        return number

    def note(self, op: int, schedule: int) -> None:
        """The rank comes to an op."""
        place = self.place
        self.pack(self.memory, place, self.clock(), self.run, op, schedule)
        place += RECORD.size
        self.place = place if place < self.end else HEADER


def flight_of(rank: int, ranks: int) -> Flight | None:
    """The record that the environment asks for, if it does."""
    folder = os.environ.get(VARIABLE)
    return Flight(Path(folder), rank, ranks) if folder else None
