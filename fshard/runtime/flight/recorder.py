"""The flight recorder: what a rank's last runs did, op by op.

Executors stamp each op that they come to. The recorder keeps the stamps of the last runs, which costs a tuple a run. It
writes them to a file when a rank loses another one, when its watchdog has seen it wait or compute for long, or when
asked. Where ``FSHARD_RECORD`` names a folder, each op is also noted in a file that is mapped into memory: that is there
however the process ends. ``fshard trace`` reads the files of all ranks.
"""

import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fshard.errors import PlanError
from fshard.forks import own
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.flight.mapped_file import VARIABLE, MappedFile, header, number_of, replace
from fshard.runtime.flight.rank_records import RECORD, SLOTS, TRACE, file_name, schedule_name, stamped
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.threads import Turn

RUNS = 32
"""The runs whose stamps are kept."""

PATIENCE = 2.0
"""Seconds for writing a record: a file system that does not answer must not hold back an error."""


Stamp = tuple[int, int]
"""A run, and its number of times."""

Kept = tuple[Stamp, str]
"""Where a rank was, and a line."""


class Noted(NamedTuple):
    """A run: its number, its schedule, and the ops and times that its executor adds to."""

    number: int
    schedule: Schedule
    ops: Sequence[Op]
    times: Sequence[float]


class Flight:
    """The record of one rank.

    Args:
        rank: this rank.
        ranks: how many there are.

    Attributes:
        name: of the job, equal on its ranks; empty before they have met.
        runs: the last runs.
        mapped: the file that has each op at once, if the environment asks for one.
        kept: where the rank was in its last failure, and what was told of its record.
        passing: whether a record was left that goes when the rank goes on.

    Raises:
        PlanError: the folder that the environment names cannot be written to.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.name = rank, ranks, ""
        self.runs: deque[Noted] = deque(maxlen=RUNS)
        folder = os.environ.get(VARIABLE)
        self.mapped = MappedFile(Path(folder), rank, ranks) if folder else None
        self.kept: Kept | None = None
        self.passing = False
        self.lock, self.turn = threading.Lock(), Turn()
        own(self)

    def disown(self, why: str) -> None:
        """Keep no record: the files are the parent's."""
        self.runs.clear()
        self.name = ""
        self.mapped, self.kept, self.passing, self.lock, self.turn = None, None, False, threading.Lock(), Turn()

    @property
    def between(self) -> str:
        """After which run this rank is, in words; empty if it is in one, or alone."""
        last = self._last if self.ranks > 1 else None
        over = last is not None and last.ops and last.ops[-1] == last.schedule[-1] and len(last.times) > len(last.ops)
        return f"between steps, after run {last.number}" if last is not None and over else ""

    @property
    def stamp(self) -> Stamp | None:
        """The progress of this rank; None before its first run."""
        last = self._last
        return None if last is None else (last.number, len(last.times))

    @property
    def _last(self) -> Noted | None:
        """The last run. Another thread may begin one meanwhile."""
        return next(reversed(self.runs.copy()), None)

    def begin(self, schedule: Schedule, ops: Sequence[Op], times: Sequence[float]) -> None:
        """A run begins, whose executor adds ops and times to these lists. Runs count in which all ranks have met."""
        number = 1
        if self.runs:
            last = self.runs[-1]
            number = last.number + bool(last.ops)
            if not last.ops:
                self.runs.pop()
        self.runs.append(Noted(number, schedule, ops, times))
        if self.mapped is not None:
            self.mapped.begin(number, schedule)

    def meet(self, name: str) -> None:
        """The ranks have met, and call their job so."""
        self.name = self.name or name

    def leave(self, reason: str, lasting: bool = True) -> str:
        """Write the record for whoever wants to know what this rank did; once where it has not gone on since.

        Args:
            reason: why; ``fshard trace`` shows it.
            lasting: whether the rank has given up, and the record stays. If not, ``withdraw`` removes it.

        Returns:
            A line for an error: where the record is, or why there is none. Empty if there is nothing to tell.
        """
        place, where = self.stamp, "the temp directory"
        if place is None or not (self.name or self.mapped):
            return ""
        if self.kept is not None and (self.kept[0] == place or not lasting):
            return self.kept[1]
        try:
            folder = self._folder()
            where, line = f"{folder}", f"`{TRACE} {folder}` shows what each rank did before."
            kept = (place, line) if lasting else None
            bounded(lambda: self._leave(folder, reason, kept), PATIENCE, "writing the record")
        except Exception as error:  # of the file system; the error that is told matters more
            line = f"No record of what this rank did before could be written to {where}: {error}"
            self.kept = (place, line) if lasting else self.kept
        return line

    def withdraw(self) -> None:
        """Remove a record that was not left for good: the rank has gone on."""
        if self.passing and self.kept is None:
            with suppress(Exception):
                bounded(self._withdraw, PATIENCE, "removing the record")

    def write(self, folder: Path, reason: str = "", lost: bool = False) -> None:
        """Write the record to a folder. The file is complete or not there. Another thread may run ops meanwhile."""
        if self.mapped is not None and folder.resolve() == self.mapped.folder.resolve():
            return  # it is there already
        rows = []
        for run in self.runs.copy():
            number = number_of(run.schedule)
            # In this order: there is a time before there is an op that communicates, and after one that computes.
            times, ops = [*run.times], [*run.ops]
            stamps = stamped(run.schedule.ops, ops[: len(times)], times)
            rows += [RECORD.pack(seconds, run.number, op, number) for seconds, op in stamps]
            path = folder / schedule_name(self.rank, number)
            if not path.exists():
                replace(path, str(run.schedule).encode())
        head = header(self.rank, self.ranks, reason, time.perf_counter(), lost)
        replace(folder / file_name(self.rank), head + b"".join(rows[-SLOTS:]))

    def _folder(self) -> Path:
        """Say where records are left."""
        return self.mapped.folder if self.mapped else Path(tempfile.gettempdir(), f"fshard-{self.name}")

    def _leave(self, folder: Path, reason: str, kept: Kept | None) -> None:
        lost = kept is not None
        with self.lock:
            if self.kept is not None and not lost:
                return
            self.kept, self.passing = kept, not lost
            if self.mapped is not None:
                self.mapped.tell(reason, lost)
                return
            try:
                self.write(own_folder(folder), reason, lost)
            except FileNotFoundError:  # another rank withdrew its record meanwhile, and the folder with it
                self.write(own_folder(folder), reason, lost)

    def _withdraw(self) -> None:
        with self.lock:
            if self.kept is not None:
                return
            self.passing = False
            if self.mapped is not None:
                self.mapped.tell("", False)
                return
            folder = self._folder()
            for path in folder.glob(f"rank{self.rank}.*"):
                path.unlink(missing_ok=True)
            folder.rmdir()  # if it is empty


def own_folder(folder: Path) -> Path:
    """A folder that only this user can read and write; made if it is not there.

    Raises:
        PlanError: something else has that name, such as a link, or a folder of another user.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PlanError("it is no folder that this user alone can read and write")
    return folder
