"""What ranks leave in the temp directory: records where one hangs or is killed, and nothing where all of them go on."""

from pathlib import Path

import pytest

from fshard.runtime.flight.rank_records import read_records
from fshard.runtime.flight.verdict import verdict
from tests.foresight import stuck
from tests.shared.children import Child
from tests.shared.workers import Pool, Pools


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are where they are without it."""
    monkeypatch.delenv("FSHARD_RECORD", raising=False)


@pytest.mark.long
@pytest.mark.processes
def test_a_rank_that_hangs_is_in_the_records_of_the_temp_directory(tmp_path: Path) -> None:
    own = Pool(2)
    try:
        error, told = own.run(stuck.told, str(tmp_path))[0]
    finally:
        own.kill()
    (folder,) = tmp_path.glob("fshard-*")
    assert error.splitlines()[-1] == f"`fshard trace {folder}` shows what each rank did before."
    lines = told.splitlines()
    assert lines[0] == "rank 0 waits for rank 1" and "'wait reduce_scatter b', of run 3" in lines[1]
    assert "timed out" in lines[2] and "'forward layer(a.w)', of run 3, for " in lines[3] and "stuck.py:" in lines[4]
    later = verdict(read_records(folder)).splitlines()  # the other one went on meanwhile, and learned of the failure
    assert later[:3] == lines[:3] and later[3] == f"{lines[3]}, and went on then" and "rank 0 gave up" in later[4]


@pytest.mark.long
def test_a_slow_rank_leaves_a_record_only_while_it_is_slow(tmp_path: Path, pool: Pools) -> None:
    for rank, (during, error) in enumerate(pool(2).run(stuck.slow, str(tmp_path))):
        assert during == (["rank0.flight", "rank1.flight"] if rank else []) and error == ""
    assert not [*tmp_path.iterdir()]


def test_what_all_ranks_raise_together_leaves_no_record(tmp_path: Path, pool: Pools) -> None:
    for rank, found in enumerate(pool(2).run(stuck.mistaken, str(tmp_path))):
        own = ["ZeroDivisionError", "DonatedError", "TreeError"]
        assert found == (own if rank else ["PeerError"] * 3)
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
@pytest.mark.parametrize("writable", [True, False])
def test_a_rank_that_is_killed(tmp_path: Path, writable: bool) -> None:
    around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stuck.free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    where, outs = str(tmp_path) if writable else "/proc/nothing", [tmp_path / f"printed by {rank}" for rank in range(2)]
    ranks = []
    for rank, out in enumerate(outs):
        own = {**around, "WORLD_SIZE": "2", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        ranks.append(Child(stuck.killed, where, out=out, environment=own))
    try:
        printed = ranks[0].printed(60)
    finally:
        for child in ranks:
            child.kill()
    assert "CommError: " in printed and "rank 1" in printed
    if not writable:
        assert "No record of what this rank did before could be written to /proc/nothing/fshard-" in printed
        return
    (folder,) = tmp_path.glob("fshard-*")
    assert f"`fshard trace {folder}` shows what each rank did before." in printed
    told = verdict(read_records(folder)).splitlines()
    assert told[:2] == ["rank 1 left no record here", "rank 0 waits for rank 1"]
    assert "'wait " in told[2] and "of run 3" in told[2] and "rank 1" in told[3]
