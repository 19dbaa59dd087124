"""Traces: events have the fields of the format, and say what the schedule says, in its order."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.runtime.flight.rank_records import HEADER, OVER, RECORD, read_records
from fshard.runtime.flight.verdict import verdict
from fshard.schedule import Costs, Link, Policy, simulate
from fshard.schedule.simulate import measured
from fshard.view.chrome import TRACKS
from tests.foresight import stuck
from tests.schedule.test_costs import SECONDS, over
from tests.shared.children import Child
from tests.shared.small_steps import trained
from tests.shared.workers import Pool, await_files

FIELDS = {
    "X": {"dur", "cat"},
    "B": {"cat"},
    "M": {"args"},
    "C": {"args"},
    "s": {"id", "cat"},
    "f": {"id", "cat", "bp"},
    "i": {"s"},
}


def events(path: Path) -> list[Any]:
    """The events of a file, each with the fields that its phase needs."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    found: list[Any] = content["traceEvents"]
    for event in found:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys() and event["ph"] in FIELDS
        assert FIELDS[event["ph"]] <= event.keys() and event["ts"] >= 0 and event.get("dur", 0) >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        # Perfetto takes 0 for the idle task, and a track of one number for one track, whatever process it is of.
        assert event["pid"] > 0 and event["tid"] // TRACKS == event["pid"]
    return [{**event, "pid": event["pid"] - 1, "tid": event["tid"] % TRACKS} for event in found]


def on_device(found: list[Any], pid: int = 0) -> list[str]:
    """The ops of a process' device, in the order of time; those of equal times stay in theirs."""
    rows = [event for event in found if event["ph"] in "XB" and (event["pid"], event["tid"]) == (pid, 0)]
    return [event["name"] for event in sorted(rows, key=lambda event: event["ts"])]


def test_predicted_beside_measured(tmp_path: Path) -> None:
    schedule = over(4, Policy())
    run = simulate(schedule, Costs(SECONDS, Link(100.0)))
    real = measured(schedule, [float(number) for number in range(len(schedule) + 1)])
    fs.view.trace(tmp_path / "step.json", {"predicted": run, "measured": real})
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
    found = events(tmp_path / "step.json")
    for pid in (0, 1):
        assert on_device(found, pid) == [str(op) for op in schedule]
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == ["predicted", "measured"]
    lanes = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"device", "all_gather over shard", "reduce_scatter over shard"} <= lanes
    seconds = max(e["ts"] + e.get("dur", 0) for e in found if e["pid"] == 0 and e["ph"] == "X") / 1e6
    assert seconds == pytest.approx(run.seconds)


def test_arrows_lead_from_transfers_to_their_waits(tmp_path: Path) -> None:
    schedule = over(4, Policy())
    fs.view.trace(tmp_path / "step.json", simulate(schedule, Costs(SECONDS, Link(10.0))))
    found = events(tmp_path / "step.json")
    starts = {e["id"]: e for e in found if e["ph"] == "s"}
    ends = {e["id"]: e for e in found if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == sum(op.kind.startswith("wait") for op in schedule)
    assert all(ends[key]["tid"] == 0 and starts[key]["tid"] > 0 for key in starts)


def test_arrows_go_forward_in_time_and_begin_and_end_in_slices(tmp_path: Path) -> None:
    costs = Costs(SECONDS, Link(10.0, latency=20.0))  # waits begin before the first byte goes
    fs.view.trace(tmp_path / "step.json", simulate(over(4, Policy()), costs))
    found = events(tmp_path / "step.json")
    slices = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"]
    starts = {e["id"]: e for e in found if e["ph"] == "s"}
    for end in [e for e in found if e["ph"] == "f"]:
        assert end["ts"] >= starts[end["id"]]["ts"]
        for event in (end, starts[end["id"]]):
            assert any(tid == event["tid"] and begin <= event["ts"] <= over for tid, begin, over in slices)


@pytest.mark.parametrize("part", [1, 3, 7, 1e3 / 13])
def test_slices_of_a_track_do_not_overlap_to_the_nanosecond(tmp_path: Path, part: float) -> None:
    schedule = over(4, Policy(prefetch=0, reduces=1))
    seconds = {op: value / part for op, value in SECONDS.items()}
    fs.view.trace(tmp_path / "step.json", simulate(schedule, Costs(seconds, Link(7 * part, latency=1e-4 / part))))
    found = [event for event in events(tmp_path / "step.json") if event["ph"] == "X"]
    for tid in {event["tid"] for event in found}:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == tid]
        spans = sorted((round(1000 * begin), round(1000 * end)) for begin, end in spans)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_memory_is_that_of_the_schedule(tmp_path: Path) -> None:
    schedule = over(4, Policy())
    fs.view.trace(tmp_path / "step.json", simulate(schedule, Costs(SECONDS, Link(10.0))))
    held = [sum(e["args"].values()) for e in events(tmp_path / "step.json") if e["ph"] == "C"]
    assert max(held) == max(schedule.memory.profile) and set(held) <= set(schedule.memory.profile)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'a': give simulations"):
        fs.view.trace(tmp_path / "a.json", {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="runs is 3"):
        fs.view.trace(tmp_path / "a.json", 3)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def recorded(steps: int = 3) -> Any:
    """A step on one rank, after some runs, whose mesh is closed."""
    with fs.make_mesh((1,), ("shard",)) as mesh:
        return trained(mesh, steps)


def test_a_real_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSHARD_RECORD", str(tmp_path))
    step = recorded()
    (record,) = read_records(tmp_path)
    texts = [str(op) for op in step.schedule]
    assert [entry.op for entry in record.entries if entry.run == 3] == [*range(len(texts)), OVER]
    assert main(["trace", str(tmp_path)]) == 0
    assert "nobody waits: all ranks have ended run 3" in capsys.readouterr().out
    assert on_device(events(tmp_path / "trace.json")) == texts * 3


def test_without_the_variable_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSHARD_RECORD", raising=False)
    monkeypatch.chdir(tmp_path)
    recorded(1)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("FSHARD_RECORD", "/proc/nothing")
    with pytest.raises(PlanError, match="FSHARD_RECORD=/proc/nothing: no record can be kept there"):
        recorded(1)


def made(folder: Path, places: dict[int, int], ranks: int, age: float = 0.0, **told: Any) -> None:
    """Records of ranks that have come to these ops of a run, and a schedule."""
    schedule = over(2, Policy(prefetch=0))
    for rank, place in places.items():
        head = {"format": "fshard flight 1", "rank": rank, "ranks": ranks, "clock": 1000.0, **told}
        count = place + 1 if place != OVER else len(schedule)
        rows = [(1.0 + 0.01 * at + (0.0 if rank else age), 7, at, 5) for at in range(count)]
        rows += [(9.0, 7, OVER, 5)] if place == OVER else []
        body = b"".join(RECORD.pack(*row) for row in rows)
        (folder / f"rank{rank}.flight").write_bytes(
            json.dumps(head).encode().ljust(HEADER) + body + bytes(RECORD.size * 3)
        )
        (folder / f"rank{rank}.{5:015x}.schedule").write_text(str(schedule))


def test_who_waits_for_whom(tmp_path: Path) -> None:
    schedule = over(2, Policy(prefetch=0))
    wait = next(at for at, op in enumerate(schedule) if op.kind == "wait all_gather")
    made(tmp_path, {0: wait, 1: wait - 1, 2: wait, 3: wait}, 4)
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[0] == "ranks 0, 2 and 3 wait for rank 1"
    assert told[2] == f"  rank 1 is at op {wait - 1} of {len(schedule)}, '{schedule[wait - 1]}', of run 7"
    made(tmp_path, {1: wait}, 4)
    assert verdict(read_records(tmp_path)).splitlines()[0].startswith("all ranks wait at the same op")
    (tmp_path / "rank2.flight").unlink()
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[:2] == ["rank 2 left no record here", "ranks 0, 1 and 3 wait for rank 2"]


def test_a_rank_that_came_late_is_named_though_it_went_on(tmp_path: Path) -> None:
    schedule = over(2, Policy(prefetch=0))
    wait = next(at for at, op in enumerate(schedule) if op.kind == "wait all_gather")
    made(tmp_path, {0: 3 * wait, 1: 3 * wait}, 3, age=0.01, lost=True, written=9.0, reason="rank 2 gave up")
    made(tmp_path, {2: wait}, 3, lost=True, written=1.005 + 0.01 * wait, reason="rank 0 did not come")
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[0] == "ranks 1 and 2 wait for rank 0"
    assert told[1].startswith(f"  rank 0 is at op {wait - 1} of ") and told[1].endswith(", and went on then")
    assert told[3].startswith(f"  rank 1 is at op {wait} of ") and told[3].endswith(", and went on then")
    assert told[5] == f"  rank 2 is at op {wait} of {len(schedule)}, '{schedule[wait]}', of run 7"
    assert told[2::2] == ["    rank 2 gave up", "    rank 2 gave up", "    rank 0 did not come"]


def test_a_rank_that_gave_up_between_steps_waited(tmp_path: Path) -> None:
    made(tmp_path, {0: OVER}, 2, lost=True, written=10.0, reason="rank 1 did not come")
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[:2] == ["rank 1 left no record here", "rank 0 waits for rank 1"]
    assert told[2].startswith("  rank 0 is between steps, after run 7, for 1.0 s when the first rank gave up")
    made(tmp_path, {1: OVER}, 2, reason="between steps, after run 7, train.py:12")
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[0] == "rank 0 waits for rank 1" and told[3].startswith("  rank 1 is between steps, after run 7")


def test_a_failure_of_long_ago_is_not_the_last_one(tmp_path: Path) -> None:
    schedule = over(2, Policy(prefetch=0))
    made(tmp_path, {0: 1}, 2, lost=True, written=1.005)
    content = (tmp_path / "rank0.flight").read_bytes()
    old = b"".join(
        RECORD.pack(*(seconds, 3, op, number)) for seconds, _, op, number in RECORD.iter_unpack(content[HEADER:])
    )
    (tmp_path / "rank0.flight").write_bytes(content[:HEADER] + old)
    made(tmp_path, {1: 4}, 2, lost=True, written=2.0)
    assert f"rank 1 is at op 4 of {len(schedule)}" in verdict(read_records(tmp_path))


def test_what_is_left_of_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, {0: 4, 1: 2}, 2)
    (tmp_path / "rank5.flight").write_bytes(b"not a record")
    content = (tmp_path / "rank1.flight").read_bytes()
    (tmp_path / "rank1.flight").write_bytes(content[: HEADER + RECORD.size * 2 + 5])  # cut off
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 0
    found = events(tmp_path / "out.json")
    texts = [str(op) for op in over(2, Policy(prefetch=0))]
    assert on_device(found, 0) == texts[:5] and on_device(found, 1) == texts[:2]
    assert [e["name"] for e in found if e["ph"] == "B" and e["tid"] == 0] == [texts[4], texts[1]]
    for path in tmp_path.glob("*.schedule"):
        path.unlink()
    assert main(["trace", str(tmp_path)]) == 0 and "rank 0 is at op 4 of run 7" in capsys.readouterr().out


def test_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no records of ranks: give the folder that an error names" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_ops_are_ranges_of_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("FSHARD_RECORD", folder)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step = recorded(1)
        seen = [event.name for event in profile.events() if event.name.startswith("fshard ")]
        assert seen == [f"fshard {op}" for op in step.schedule]
    assert len(read_records(tmp_path)[0].entries) == len(step.schedule) + 1


@pytest.mark.processes
def test_ranks_that_were_killed_leave_who_was_stuck_where(tmp_path: Path) -> None:
    around = {"FSHARD_RECORD": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stuck.free_port())}
    around |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    outs = [tmp_path / f"printed by {rank}" for rank in range(2)]
    ranks = [
        Child(stuck.main, out=out, environment={**around, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
        for rank, out in enumerate(outs)
    ]
    try:
        await_files([str(outs[1])], 60)
        assert outs[1].read_text() == "stuck\n"
        deadline = time.monotonic() + 20
        while "rank 0 waits" not in verdict(read_records(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    told = verdict(read_records(tmp_path)).splitlines()
    assert told[0] == "rank 0 waits for rank 1"
    assert "'forward layer(a.w)', of run 3" in told[2] and "of run 3" in told[1] and "'wait " in told[1]
    assert main(["trace", str(tmp_path)]) == 0
    last = [event["name"] for event in events(tmp_path / "trace.json") if event["ph"] == "B" and event["tid"] == 0]
    assert "forward layer(a.w)" in last


@pytest.mark.processes
@pytest.mark.long
def test_an_error_names_the_rank_and_the_op_that_others_wait_for() -> None:
    own = Pool(2)
    try:
        waited, _ = own.run(stuck.named)
    finally:
        own.kill()
    rows = {line.split(":")[0].strip(): line for line in waited.splitlines()}
    assert "timed out" in waited.splitlines()[0] and "at op 17 of 20, 'wait " in rows["rank 0"]
    assert "'forward layer(a.w)'" in rows["rank 1"] and "stuck.py:" in rows["rank 1"]
