"""Records of ranks: which op each rank came to, and when.

A rank's file has a header, which is a line of JSON, and a ring of records: seconds, the number of the run, the number
of the op, and the number of the schedule, whose text lies in a file beside it. What is damaged or missing is told of.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fshard.errors import PlanError, ShardError
from fshard.reading.files import printable
from fshard.reading.texts import parse_json, read_bytes, read_text
from fshard.schedule.ops import COMPUTE_KINDS, STEP_KINDS, Op
from fshard.schedule.schedule import Schedule, parse
from fshard.schedule.transfers import awaited

FORMAT = "fshard flight 1"
RECORD = struct.Struct("<dIiQ")
HEADER, SLOTS = 4096, 8192
RANKS, SCHEDULES, TEXT = 1 << 20, 64, 4 << 20
"""The most ranks of a job, schedules of a record, and bytes of a schedule's text."""

NAME = re.compile(r"rank(\d+)\.flight")
"""The names of ranks' files."""

TRACE = "fshard trace"
"""The command that reads records."""

OVER = -1
"""The number of the op that comes after a step's last."""


def file_name(rank: int) -> str:
    """The file of a rank's record."""
    return f"rank{rank}.flight"


def schedule_name(rank: int, schedule: int) -> str:
    """The file of a schedule's text."""
    return f"rank{rank}.{schedule:015x}.schedule"


def stamped(ops: Sequence[Op], ran: Sequence[Op], times: Sequence[float]) -> list[tuple[float, int]]:
    """Say when a run came to each of its ops, by their numbers, and last to the op that is under way, or to its end.

    Args:
        ops: those of the schedule.
        ran: the ops that were come to, in order. Only compute ops are left out by a program that skips calls.
        times: when each of them began; one more where an op that communicates is under way, or the run is over.
    """
    at, found = -1, []
    for op, seconds in zip(ran, times, strict=False):
        at = ops.index(op, at + 1)
        found.append((seconds, at))
    if len(times) > len(ran):
        due = (place for place in range(at + 1, len(ops)) if ops[place].kind not in COMPUTE_KINDS)
        found.append((times[len(ran)], next(due, OVER)))
    return found


@dataclass(frozen=True)
class FlightEntry:
    """A rank came to an op: the seconds since the epoch, the run, the op and the schedule, by their numbers."""

    time: float
    run: int
    op: int
    schedule: int


@dataclass(frozen=True)
class RankRecord:
    """The record that one rank has left.

    Attributes:
        ranks: how many there were.
        entries: from the oldest to the newest.
        schedules: those that could be read, by number.
        reason: why it was written: what the rank raised, or where it had been for long; empty if nobody said.
        written: when, in seconds since the epoch; 0 for a ring that is written as the rank goes on.
        lost: whether it was written because the rank gave up waiting for others.
        damage: what is wrong with its files; empty if nothing is. What could be read is there.
    """

    rank: int
    ranks: int
    entries: Sequence[FlightEntry]
    schedules: Mapping[int, Schedule] = field(repr=False)
    reason: str = ""
    written: float = 0.0
    lost: bool = False
    damage: str = ""

    @property
    def place(self) -> tuple[int, float]:
        """The run and the op that the rank has come to; after a run's last op, infinity."""
        entry = self.entries[-1]
        return entry.run, math.inf if entry.op == OVER else entry.op

    @property
    def latest(self) -> float:
        """Say when anything was last noted or written; 0 if nothing was."""
        return max([self.written, *(entry.time for entry in self.entries[-1:])])

    def words(self, entry: FlightEntry) -> str:
        """An entry in words."""
        if entry.op == OVER:
            return f"between steps, after run {entry.run}"
        schedule = self.schedules.get(entry.schedule)
        if schedule is None or not 0 <= entry.op < len(schedule):
            return f"op {entry.op} of run {entry.run}"
        return f"op {entry.op} of {len(schedule)}, '{printable(str(schedule[entry.op]))}', of run {entry.run}"

    def waits(self, entry: FlightEntry) -> bool:
        """Tell whether the op of an entry waits for other ranks."""
        schedule = self.schedules.get(entry.schedule)
        if entry.op == OVER or schedule is None or not 0 <= entry.op < len(schedule):
            return False
        kind = schedule[entry.op].kind
        return awaited(kind) is not None or kind in STEP_KINDS


def read_records(folder: Path) -> list[RankRecord]:
    """The records of all ranks in a folder.

    Raises:
        PlanError: there are none.
    """
    found = [record for path in sorted(folder.glob("rank*.flight")) for record in _record(path)]
    if not found:
        raise PlanError(
            f"{folder} has no records of ranks: give the folder that an error names, or that of fs.view.record, or set "
            f"FSHARD_RECORD={folder} where the ranks start"
        )
    return sorted(found, key=lambda record: record.rank)


def _record(path: Path) -> Iterator[RankRecord]:
    """The record of a file, without entries if it cannot be read; none if the file is not of a rank."""
    name = NAME.fullmatch(path.name)
    if name is None or path.is_dir():
        return
    try:
        content = read_bytes(path)
        head = parse_json(content[:HEADER])
        rank, ranks, clock = int(head["rank"]), int(head["ranks"]), float(head["clock"])
        reason, written = str(head.get("reason", "")), float(head.get("written", 0.0))
        lost = bool(head.get("lost"))
        if not 0 <= rank < ranks <= RANKS:
            raise ValueError(f"rank {rank} of {ranks}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        damaged = f"{path.name} cannot be read: it is damaged, or being made"
        yield RankRecord(int(name[1]), 0, (), {}, damage=damaged)
        return
    beyond = max(len(content) - HEADER, 0) % RECORD.size
    damage = [f"{path.name} is cut off within its last entry"] if beyond or len(content) < HEADER else []
    body = content[HEADER : len(content) - beyond]
    rows = [row for row in RECORD.iter_unpack(body) if 0 < row[0] < math.inf]
    entries = [FlightEntry(seconds + clock, run, op, number) for seconds, run, op, number in sorted(rows)]
    schedules = {}
    for number in sorted({entry.schedule for entry in entries})[:SCHEDULES]:
        text = path.parent / schedule_name(rank, number)
        try:
            schedules[number] = parse(read_text(text, TEXT))
        except (ShardError, ValueError):
            damage.append(f"{text.name} cannot be read: its ops are told by number")
    yield RankRecord(rank, ranks, entries, schedules, reason, written and written + clock, lost, "; ".join(damage))
