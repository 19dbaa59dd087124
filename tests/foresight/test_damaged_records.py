"""Records that are damaged: what is wrong is told, and what is there is shown."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fshard.cli.main import main
from fshard.runtime.flight.rank_records import HEADER, OVER, RECORD, read_records, schedule_name
from fshard.runtime.flight.verdict import verdict
from fshard.schedule import Call, GroupInfo, Policy, Program, Schedule, Transfer, build


def two(folder: Path, last: int = OVER, ranks: int = 2, clock: float = 100.0) -> Schedule:
    """Records of two ranks or more, in which rank 0 has come to an op, and the others have ended."""
    folder.mkdir(exist_ok=True)
    group = GroupInfo("layer", 200, 100, 0, False, (Transfer("all_gather", "state", "param", sent=100),))
    schedule = build(Program((Call("layer"),), (), {"layer": (0,)}), [group], Policy(), train=False)
    for rank, op in enumerate([last] + [OVER] * (ranks - 1)):
        head = json.dumps({"rank": rank, "ranks": ranks, "clock": clock}).encode().ljust(HEADER)
        rows = [RECORD.pack(1.0 + at, 7, at, 5) for at in range(2)] + [RECORD.pack(3.0, 7, op, 5)]
        (folder / f"rank{rank}.flight").write_bytes(head + b"".join(rows))
        (folder / schedule_name(rank, 5)).write_text(str(schedule))
    return schedule


def told(folder: Path) -> str:
    return verdict(read_records(folder))


@pytest.mark.parametrize("spoil", [lambda b: b"", lambda b: b[:10], lambda b: bytes(range(256)) * 20, lambda b: b[4:]])
def test_a_record_that_cannot_be_read(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    schedule = two(tmp_path)
    path = tmp_path / "rank1.flight"
    path.write_bytes(spoil(path.read_bytes()))
    text = told(tmp_path)
    assert "rank1.flight" in text and "damaged" in text and "left no record" not in text
    wait = next(at for at, op in enumerate(schedule) if op.kind == "wait all_gather")
    two(tmp_path, wait)
    path.write_bytes(spoil(path.read_bytes()))
    assert "whether rank 0 waits for rank 1 is not known" in told(tmp_path)


def test_a_record_that_is_cut_off(tmp_path: Path) -> None:
    two(tmp_path)
    path = tmp_path / "rank1.flight"
    path.write_bytes(path.read_bytes()[:-7])
    text = told(tmp_path)
    assert "rank1.flight is cut off within its last entry" in text and "rank 1 is at op 1" in text


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x80" * 9])
def test_a_schedule_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    two(tmp_path, 1)
    path = tmp_path / schedule_name(0, 5)
    path.write_bytes(content) if content is not None else path.unlink()
    text = told(tmp_path)
    assert f"{path.name} cannot be read" in text and "rank 0 is at op 1 of run 7" in text


def test_a_folder_is_no_record(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "rank2.flight").mkdir()
    assert told(tmp_path).startswith("nobody waits")


def test_records_of_an_earlier_job_of_more_ranks_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, ranks=4, clock=50.0)
    (tmp_path / "rank3.flight").write_bytes(b"")
    two(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "rank 2 of another job, of 4 ranks: left out" in text and "rank 3 of another job, of more ranks" in text
    assert "nobody waits" in text and "of 2 ranks:" in text and "rank 2" not in (tmp_path / "trace.json").read_text()


def test_the_newest_job_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """Also where it has come to no op, and where a record cannot be read."""
    two(tmp_path, ranks=2, clock=50.0)
    head = {"rank": 0, "ranks": 4, "clock": 500.0, "written": 1.0, "reason": "lost", "lost": True}
    for rank in (0, 2):
        (tmp_path / f"rank{rank}.flight").write_bytes(json.dumps({**head, "rank": rank}).encode().ljust(HEADER))
    assert "rank 1 of another job, of 2 ranks: left out" in told(tmp_path)
    (tmp_path / "rank0.flight").write_bytes(b"")
    (tmp_path / "rank1.flight").write_bytes(json.dumps({**head, "rank": 1, "written": 0.0}).encode().ljust(HEADER))
    assert "another job" not in told(tmp_path)


def test_records_of_an_earlier_job_of_fewer_ranks_are_left_out(tmp_path: Path) -> None:
    two(tmp_path, ranks=4)
    for rank in (2, 3):
        (tmp_path / f"rank{rank}.flight").unlink()
    for path in two(tmp_path / "first", clock=50.0) and sorted((tmp_path / "first").glob("rank1.flight")):
        path.rename(tmp_path / path.name)
    text = told(tmp_path)
    assert "rank 1 of another job, of 2 ranks: left out" in text and "ranks 1, 2 and 3 left no record here" in text
