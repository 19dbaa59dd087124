"""The harness itself: results by rank, and a full account of every way in which a rank can fail."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.shared.children import Child
from tests.shared.workers import Pool, Pools, WorkerError, await_files

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[Pools]:
    """Pools of this module's own: most tests here end them, and others would start with cold ranks."""
    pools = Pools()
    yield pools
    pools.close()


def rank_and_sum(offset: int) -> tuple[int, int, int, float]:
    """Rank, world, threads, and a sum over the ranks."""
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), value.item()


def tensor_of_rank() -> torch.Tensor:
    """A tensor that must survive the way back."""
    return torch.arange(3) + dist.get_rank()


def raise_on(bad: int) -> int:
    """Raise on one rank; the others return."""
    if dist.get_rank() == bad:
        raise ValueError(f"rank {bad} does not like it")
    return dist.get_rank()


def raise_while_others_wait(bad: int) -> None:
    """Raise on one rank while the others wait for it in a collective."""
    if dist.get_rank() == bad:
        raise ValueError("not coming")
    dist.barrier()


def leave(how: str) -> None:
    """End the process of rank 1 without a word."""
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSEGV)


def sleep_on(bad: int) -> None:
    """Hang on one rank."""
    if dist.get_rank() == bad:
        stuck_here()


def stuck_here() -> None:
    """A name to look for in the stack."""
    time.sleep(600)


def not_picklable() -> object:
    """Return what cannot travel."""
    return lambda: None


def cpu_seconds() -> float:
    """The CPU time of this rank so far."""
    return time.process_time()


def test_results_by_rank(pool: Pools) -> None:
    assert pool(3).run(rank_and_sum, 1) == [(0, 3, 1, 6.0), (1, 3, 1, 6.0), (2, 3, 1, 6.0)]
    assert pool(1).run("tests.comm.test_workers:rank_and_sum", 4) == [(0, 1, 1, 4.0)]
    assert [t.tolist() for t in pool(2).run(tensor_of_rank)] == [[0, 1, 2], [1, 2, 3]]


def test_one_pool_of_each_size_which_lives_on(pool: Pools) -> None:
    pool(2).run(rank_and_sum, 0)
    before = pool(2).pids()
    pool(2).run(rank_and_sum, 0)
    assert pool(2) is pool(2)
    assert len(before) == 2
    assert pool(2).pids() == before


def test_an_exception_comes_with_its_traceback(pool: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(3).run(raise_on, 1)
    text = str(caught.value)
    assert "ValueError: rank 1 does not like it" in text
    assert "in raise_on" in text
    assert "failed on [1]" in text
    assert "ranks [0, 2] returned" in text
    assert pool(3).run(rank_and_sum, 0)[0] == (0, 3, 1, 3.0)  # a fresh pool


def test_every_traceback_is_shown(pool: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run("tests.comm.test_workers:no_such_function")
    assert str(caught.value).count("AttributeError") == 2


def test_ranks_left_waiting_by_an_exception_are_named() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        Pool(2, grace=0.5).run(raise_while_others_wait, 0)
    text = str(caught.value)
    assert "ValueError: not coming" in text
    assert "rank 1 " in text
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize(("how", "cause"), [("exit", "exit code 7"), ("signal", "killed by SIGSEGV")])
def test_death_is_reported_with_its_cause(pool: Pools, how: str, cause: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run(leave, how)
    assert f"rank 1 died: {cause}" in str(caught.value)
    if how == "signal":
        assert "in leave" in str(caught.value)
    assert len(pool(2).run(rank_and_sum, 0)) == 2


def test_a_hang_ends_with_the_stack_of_the_ranks_that_hang(pool: Pools) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool(2).run(sleep_on, 1, timeout=1.0)
    text = str(caught.value)
    assert "still running on [1]" in text
    assert "in stuck_here" in text
    assert "ranks [0] returned" in text
    assert time.monotonic() - began < 20.0


def test_a_result_that_cannot_be_pickled_is_an_error(pool: Pools) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        pool(1).run(not_picklable)


def test_idle_ranks_use_no_cpu(pool: Pools) -> None:
    (before,) = pool(1).run(cpu_seconds)
    time.sleep(0.5)
    (after,) = pool(1).run(cpu_seconds)
    assert after - before < 0.2


def test_ranks_are_reaped() -> None:
    pool = Pool(2)
    pool.run(rank_and_sum, 0)
    pids = pool.pids()
    pool.close()
    assert not pool.pids()
    assert not [pid for pid in pids if _alive(pid)]


def parent() -> None:
    """In a process of its own: start ranks, say which, and wait for them."""
    pool = Pool(2)
    pool.run(cpu_seconds)
    print(*pool.pids(), flush=True)
    pool.run(sleep_on, 0)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    child = Child(parent, out=tmp_path / "pids", environment={})
    await_files([str(child.out)], 30)
    child.kill()
    pids = [int(pid) for pid in child.out.read_text().split()]
    deadline = time.monotonic() + 10.0
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
