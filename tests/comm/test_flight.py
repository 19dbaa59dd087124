"""The flight recorder that is always on: stamps become records, written once a failure, to a folder of one's own."""

import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import CommError, PlanError
from fshard.runtime.comm.watchdog import Watchdog
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.route import make_route
from fshard.runtime.flight import recorder as module
from fshard.runtime.flight.mapped_file import MappedFile
from fshard.runtime.flight.rank_records import OVER, SLOTS, RankRecord, read_records, stamped
from fshard.runtime.flight.recorder import RUNS, Flight
from fshard.runtime.flight.verdict import verdict
from fshard.schedule import Op, Policy
from fshard.schedule.ops import COMPUTE_KINDS
from fshard.schedule.schedule import Schedule
from tests.schedule.test_costs import over
from tests.shared.small_steps import trained

SCHEDULE = over(3, Policy(prefetch=1))
COMPUTES = [at for at, op in enumerate(SCHEDULE) if op.kind in COMPUTE_KINDS]


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temp directory of the test's own, and no variable."""
    monkeypatch.delenv("FSHARD_RECORD", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ran(flight: Flight, count: int, schedule: Schedule = SCHEDULE, under_way: bool = False) -> None:
    """A run that has come to so many ops."""
    times = [1e4 * (len(flight.runs) + 1) + at for at in range(count + under_way)]
    flight.begin(schedule, list(schedule.ops[:count]), times)


def flight_of(rank: int = 0, ranks: int = 2, name: str = "job") -> Flight:
    """The recorder of a rank that has met the others."""
    flight = Flight(rank, ranks)
    flight.meet(name)
    return flight


def places(record: RankRecord) -> list[tuple[int, int]]:
    """The runs and ops of a record."""
    return [(entry.run, entry.op) for entry in record.entries]


@given(st.sets(st.sampled_from(COMPUTES)), st.integers(0, len(SCHEDULE)), st.booleans())
def test_stamps_are_of_the_ops_that_were_come_to(skipped: set[int], count: int, under_way: bool) -> None:
    come = [at for at in range(len(SCHEDULE)) if at not in skipped]
    done, ahead = come[:count], [at for at in come[count:] if SCHEDULE[at].kind not in COMPUTE_KINDS]
    times = [float(at) for at in range(len(done) + under_way)]
    found = stamped(SCHEDULE.ops, [SCHEDULE[at] for at in done], times)
    if under_way:
        done.append(ahead[0] if ahead else OVER)
    assert found == [(float(number), at) for number, at in enumerate(done)]


class Doing:
    """Actions whose ops do what a test says."""

    def __init__(self, **kinds: Any) -> None:
        self.kinds, self.readable = kinds, set[int]()

    def bind(self, ops: Any) -> list[Any]:
        """What ops do."""
        free = (*COMPUTE_KINDS, "update", "handshake", "consensus")
        return [None if op.kind in free else self.kinds.get(op.kind.replace(" ", "_"), bool) for op in ops]

    def apply(self, groups: Any) -> None:
        """Update."""
        self.kinds.get("update", bool)()

    def where(self, name: str) -> str:
        """Nowhere."""
        return ""


def executed(**kinds: Any) -> tuple[Flight, Scheduled]:
    """A run of the schedule until an op raises, and its recorder."""
    actions, flight = Doing(**kinds), flight_of()
    executor = Scheduled(make_route(SCHEDULE, actions), actions)  # type: ignore[arg-type]
    flight.begin(SCHEDULE, executor.record, executor.times)
    executor.handshake(bool)
    return flight, executor


def snapshot(flight: Flight) -> list[int]:
    """The ops in the record of now."""
    folder = tempfile.mkdtemp()
    flight.write(Path(folder))
    return [entry.op for entry in read_records(Path(folder))[0].entries]


def test_the_op_under_way_is_the_last_of_a_record() -> None:
    seen: list[list[int]] = []
    flight, executor = executed(
        wait_all_gather=lambda: seen.append(snapshot(flight)), update=lambda: seen.append(snapshot(flight))
    )
    for at in COMPUTES:
        op = SCHEDULE[at]
        executor.reach(op.kind, op.target, op.index)
        assert snapshot(flight) == [*range(at + 1)]
    executor.finish()
    assert {len(ops) - 1 for ops in seen} >= {
        at for at, op in enumerate(SCHEDULE) if op.kind == "wait all_gather"
    } and all(ops == [*range(len(ops))] for ops in seen)
    executor.consensus(lambda: seen.append(snapshot(flight)))
    assert seen[-1] == [*range(len(SCHEDULE))] and snapshot(flight) == [*range(len(SCHEDULE)), OVER]
    assert len(executor.times) == len(executor.record) + 1


@pytest.mark.parametrize("kind", ["wait_all_gather", "update"])
def test_an_op_that_is_issued_once_more_has_one_stamp(kind: str) -> None:
    calls: list[int] = []

    def once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")

    flight, executor = executed(**{kind: once})
    with pytest.raises(ValueError, match="once"):
        executor.finish()
    executor.drain()
    executor.consensus(bool)
    ran = [at for at, op in enumerate(SCHEDULE) if op.kind not in COMPUTE_KINDS]
    assert snapshot(flight) == [*ran, OVER] and len(executor.times) == len(executor.record) + 1


def test_a_wait_that_fails_is_the_last_op_of_its_run() -> None:
    def lost() -> None:
        raise CommError("timed out")

    flight, executor = executed(wait_all_gather=lost)
    with pytest.raises(CommError, match="wait all_gather"):
        executor.finish()
    first = next(at for at, op in enumerate(SCHEDULE) if op.kind == "wait all_gather")
    assert snapshot(flight)[-1] == first


def test_a_record_is_left_in_a_folder_of_ones_own(temp: Path) -> None:
    for rank in range(2):
        flight = flight_of(rank)
        ran(flight, len(SCHEDULE))
        ran(flight, 3 + rank, under_way=True)
        line = flight.leave(f"CommError: rank {1 - rank} did not come\nwhat each rank was calling")
        assert line == f"`fshard trace {temp / 'fshard-job'}` shows what each rank did before."
    folder = temp / "fshard-job"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == [".flight", ".flight", ".schedule", ".schedule"]
    records = read_records(folder)
    assert [record.reason for record in records] == [f"CommError: rank {1 - rank} did not come" for rank in range(2)]
    assert [record.rank for record in records] == [0, 1] and all(record.written > 1e9 for record in records)
    ops = [*range(len(SCHEDULE))]
    assert [places(record)[-2] for record in records] == [(2, 2), (2, 3)]
    assert places(records[0])[: len(ops)] == [(1, op) for op in ops]
    assert "    CommError: rank 1 did not come" in verdict(records).splitlines()


def test_a_failure_leaves_one_record_and_the_next_another(temp: Path) -> None:
    flight = flight_of()
    ran(flight, 3)
    line = flight.leave("one")
    assert flight.leave("a consequence") == line and read_records(temp / "fshard-job")[0].reason == "one"
    ran(flight, 4)
    assert flight.leave("two") == line and read_records(temp / "fshard-job")[0].reason == "two"


def test_without_a_run_or_a_job_there_is_nothing_to_leave(temp: Path) -> None:
    assert flight_of().leave("lost") == ""
    alone = Flight(0, 1)
    ran(alone, 3)
    assert alone.leave("lost") == "" and not [*temp.iterdir()]


def test_a_record_of_a_rank_that_goes_on_is_withdrawn(temp: Path) -> None:
    flights = [flight_of(rank) for rank in (1, 10)]
    for flight in flights:
        ran(flight, 3)
        flight.leave("here for 10 s", lasting=False)
    flights[0].withdraw()
    assert [record.rank for record in read_records(temp / "fshard-job")] == [10]
    flights[1].withdraw()
    assert not [*temp.iterdir()]
    flights[0].leave("here again", lasting=False)
    flights[0].leave("timed out")
    flights[0].withdraw()
    flights[0].leave("slow", lasting=False)
    assert read_records(temp / "fshard-job")[0].reason == "timed out"


def test_a_record_is_bounded() -> None:
    flight = flight_of()
    for _ in range(RUNS + 5):
        ran(flight, len(SCHEDULE))
    assert len(flight.runs) == RUNS and flight.runs[-1].number == RUNS + 5
    long = SimpleNamespace(ops=SCHEDULE.ops * (2 * SLOTS // len(SCHEDULE) + 1), hash="0" * 64)
    flight.begin(long, long.ops[: 2 * SLOTS], [1.0] * 2 * SLOTS)  # type: ignore[arg-type]
    assert len(snapshot(flight)) == SLOTS


def test_runs_count_in_which_the_ranks_have_met() -> None:
    here, there = flight_of(0), flight_of(1)
    for flight in (here, there):
        ran(flight, len(SCHEDULE))
    ran(here, 0)  # its handshake fails, since the other rank refuses the step before it begins
    for flight in (here, there):
        ran(flight, 5)
    assert [run.number for run in here.runs] == [run.number for run in there.runs] == [1, 2]


@pytest.mark.parametrize("what", ["a link", "a file", "open to others", "of another user", "nowhere"])
def test_a_folder_that_is_not_ones_own_is_left_alone(temp: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder, elsewhere = temp / "fshard-job", temp / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "a link":
        folder.symlink_to(elsewhere)
    elif what == "a file":
        folder.write_text("")
    elif what == "nowhere":
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
        folder = Path("/proc/nothing/fshard-job")
    else:
        folder.mkdir(mode=0o755 if what == "open to others" else 0o700)
    if what == "of another user":
        user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: user)
    flight = flight_of()
    ran(flight, 3)
    line = flight.leave("lost")
    assert line.startswith(f"No record of what this rank did before could be written to {folder}: ")
    assert "\n" not in line and not [*elsewhere.iterdir()] and not [*temp.glob("*/*")]
    assert flight.leave("lost") == line


def test_a_file_system_that_does_not_answer_holds_back_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monkeypatch.setattr(module, "own_folder", lambda folder: answered.wait(20) and folder)
    flight = flight_of()
    ran(flight, 3)
    assert "timed out after 0.05 s: writing the record did not end" in flight.leave("lost")
    answered.set()


def test_a_record_may_be_written_while_the_rank_goes_on(temp: Path) -> None:
    flight, over, whole = flight_of(), threading.Event(), [*range(len(SCHEDULE)), OVER]

    def run() -> None:
        while not over.is_set():
            ops: list[Op] = []
            times: list[float] = []
            flight.begin(SCHEDULE, ops, times)
            for op in SCHEDULE:  # as in an executor
                if op.kind in COMPUTE_KINDS:
                    ops.append(op)
                    times.append(time.perf_counter())
                else:
                    times.append(time.perf_counter())
                    ops.append(op)
            times.append(time.perf_counter())

    ran(flight, 1)
    rank, interval = threading.Thread(target=run), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    rank.start()
    try:
        for _ in range(100):
            flight.write(temp)
            runs: dict[int, list[int]] = {}
            for number, op in places(read_records(temp)[0]):
                runs.setdefault(number, []).append(op)
            assert all(ops == whole[: len(ops)] for ops in runs.values())
    finally:
        over.set()
        rank.join(20)
        sys.setswitchinterval(interval)


@pytest.mark.long
def test_the_watchdog_leaves_a_record_as_long_as_a_wait_lasts(temp: Path) -> None:
    flight = flight_of()
    ran(flight, 3)
    watchdog = Watchdog(0, 1.0, print, flight=flight)
    watchdog.start()
    try:
        with watchdog.waiting("all-gather on control(shard)", 1):
            until(lambda: bool([*temp.glob("*/*.flight")]))
        assert "test_flight.py:" in read_records(temp / "fshard-job")[0].reason
        until(lambda: not [*temp.iterdir()])
    finally:
        watchdog.close()


@pytest.mark.long
def test_a_rank_that_is_between_steps_for_long_leaves_a_record_until_the_next(temp: Path) -> None:
    flight = flight_of()
    ran(flight, len(SCHEDULE), under_way=True)
    assert flight.between == "between steps, after run 1"
    watchdog = Watchdog(0, 1.0, print, flight=flight)
    watchdog.start()
    try:
        until(lambda: bool([*temp.glob("*/*.flight")]))
        reason = read_records(temp / "fshard-job")[0].reason
        assert reason.startswith("between steps, after run 1, ") and "test_flight.py:" in reason
        ran(flight, 3)
        until(lambda: not [*temp.iterdir()])
        ran(flight, len(SCHEDULE), under_way=True)
        until(lambda: bool([*temp.glob("*/*.flight")]))
        watchdog.end()
        assert not [*temp.iterdir()]
    finally:
        watchdog.close()


def test_a_rank_alone_or_in_a_run_is_not_between_steps() -> None:
    alone, within = flight_of(ranks=1), flight_of()
    ran(alone, len(SCHEDULE), under_way=True)
    ran(within, len(SCHEDULE) - 1, under_way=True)
    assert (alone.between, within.between, flight_of().between) == ("", "", "")


def until(come: Callable[[], bool]) -> None:
    """Wait until something has come about."""
    deadline = time.monotonic() + 4.0
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_with_the_variable_the_mapped_file_is_the_record(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSHARD_RECORD", str(temp / "run"))
    flight = flight_of()
    assert isinstance(flight.mapped, MappedFile)
    ran(flight, 3)
    for at in range(3):
        flight.mapped.note(at)
    line = flight.leave("rank 1 did not come \U0001f680" * 40)
    assert line == f"`fshard trace {temp / 'run'}` shows what each rank did before."
    flight.write(temp / "run")  # the file stays the mapped one
    flight.mapped.note(3)
    (record,) = read_records(temp / "run")
    assert places(record) == [(1, 0), (1, 1), (1, 2), (1, 3)] and record.reason.startswith("rank 1 did not come")
    assert [path.name for path in temp.iterdir()] == ["run"]


def test_a_program_may_ask_for_its_record(temp: Path) -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        with pytest.raises(PlanError, match="no step has run on it yet"):
            fs.view.record(temp / "run", mesh)
        step = trained(mesh, 3)
        fs.view.record(temp / "run", mesh)
        with pytest.raises(PlanError, match="/proc/nothing'.*cannot be written there"):
            fs.view.record("/proc/nothing", mesh)
    (record,) = read_records(temp / "run")
    assert places(record) == [(run, op) for run in (1, 2, 3) for op in [*range(len(step.schedule)), OVER]]
    times = [entry.time for entry in record.entries if entry.run == 3]
    assert [b - a for a, b in zip(times, times[1:], strict=False)] == pytest.approx(
        [b - a for a, b in zip(step.latest.times, step.latest.times[1:], strict=False)], abs=1e-5
    )
    with pytest.raises(PlanError, match="ranks without processes keep no record"):
        fs.view.record(temp, fs.virtual_mesh((2,), ("shard",)))
