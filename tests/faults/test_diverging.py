"""Ranks that diverge do not hang: all others get an error that names the rank, the op, the unit and the paths."""

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from tests.faults.program import Fault, batch, make_loss, start
from tests.shared.bad import Raised, attempt, weights
from tests.shared.workers import Pool, Pools, WorkerError, await_files

pytestmark = pytest.mark.processes

TIMEOUT, LONG = 3.0, 25.0
"""Seconds that ranks wait for one that hangs; and for others, which are found out at once."""


def _leaves(how: str, others: Sequence[str]) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(5)
    if how == "hangs":
        await_files(others, LONG)  # a rank that hangs does so for longer than anyone waits for it
        os._exit(5)
    sys.exit(5)


def leaving(kind: str, how: str, where: str, report: str) -> None:
    """On a rank: good steps, then one in which rank 1 leaves; the others write down what they get, and when."""
    dist.barrier()  # ranks begin together, however busy the machine is
    mesh = fs.make_mesh((-1,), ("shard",), timeout=TIMEOUT if how == "hangs" else LONG, shared_memory=kind == "host")
    plan, opt, state = start(mesh)
    fault = Fault()
    step = fs.make_train_step(make_loss(fault), opt, plan)
    state, _ = step(state, batch(0, mesh.rank))
    if mesh.rank == 1:
        route = step._runner.latest.prepared.route  # type: ignore[union-attr]
        at = [str(op) for op in route.schedule].index(where)
        run = route.runs[at]

        def leave() -> None:
            _leaves(how, [f"{report}{rank}" for rank in range(mesh.size) if rank != 1])
            run()

        route.runs[at] = leave
        step(state, batch(1, mesh.rank))
        return
    began = time.monotonic()
    raised = attempt(lambda: step(state, batch(1, mesh.rank)))
    Path(f"{report}{mesh.rank}").write_bytes(pickle.dumps((raised, time.monotonic() - began)))


def _run(function: Callable[..., None], *args: Any, world: int, folder: Path) -> list[tuple[Raised, float]]:
    own = Pool(world, LONG)  # whose process group is lost
    try:
        with contextlib.suppress(WorkerError):  # rank 1 may die
            own.run(function, *args, f"{folder}/")
    finally:
        own.kill()
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world) if rank != 1]


@pytest.mark.parametrize(
    ("kind", "how", "where"),
    [
        ("host", "killed", "all_gather middle"),
        ("gloo", "killed", "all_gather middle"),
        ("host", "hangs", "reduce_scatter last"),
    ],
)
def test_a_rank_that_leaves_is_named(kind: str, how: str, where: str, tmp_path: Path) -> None:
    for raised, seconds in _run(leaving, kind, how, where, world=3, folder=tmp_path):
        assert raised is not None and "CommError" in raised.kinds, raised
        for part in ("rank 1", "op ", "unit ", ".w"):
            assert part in raised.text, raised.text
        assert seconds < LONG and ("timed out" in raised.text) is (how == "hangs"), raised.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "gloo"])
@pytest.mark.parametrize(
    "where",
    [
        "all_gather first",
        "wait all_gather last",
        "reduce_scatter middle",
        "reduce_scatter last",
        "wait reduce_scatter first",
    ],
)
@pytest.mark.parametrize("how", ["killed", "exits", "hangs"])
def test_a_rank_that_leaves_anywhere(kind: str, how: str, where: str, tmp_path: Path) -> None:
    for raised, seconds in _run(leaving, kind, how, where, world=3, folder=tmp_path):
        assert raised is not None and "CommError" in raised.kinds and "rank 1" in raised.text, raised
        assert ("unit " in raised.text or "'consensus'" in raised.text) and seconds < LONG  # which is of no unit


def other_op(kind: str) -> tuple[Raised | None, float]:
    """On a rank: ranks issue different collectives of one length on one communicator."""
    dist.barrier()
    mesh = fs.make_mesh((-1,), ("shard",), timeout=LONG if kind == "host" else TIMEOUT, shared_memory=kind == "host")
    comm = mesh.transport.communicator("collectives", ("shard",))
    comm.all_reduce(torch.ones(4)).wait()
    began = time.monotonic()
    call = (
        (lambda: comm.all_reduce(torch.ones(8)))
        if mesh.rank
        else (lambda: comm.all_gather(torch.ones(16), torch.ones(8)))
    )
    raised = attempt(lambda: call().wait())
    return raised, time.monotonic() - began


@pytest.mark.parametrize("kind", ["host", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ranks_that_issue_different_collectives(kind: str) -> None:
    own = Pool(2)
    try:
        for rank, (raised, seconds) in enumerate(own.run(other_op, kind)):
            assert raised is not None and "CommError" in raised.kinds
            if kind == "host" and "gave up" not in raised.text:
                assert f"rank {1 - rank} has come to another collective: " in raised.text
                assert "all-gather of 32" in raised.text and "all-reduce of 32" in raised.text
                assert seconds < LONG
    finally:
        own.kill()


def other_branch() -> tuple[Raised | None, bool]:
    """On a rank: Python that differs between ranks calls other units; then they agree again."""
    with fs.make_mesh((-1,), ("shard",), timeout=20.0) as mesh:
        plan, opt, state = start(mesh)
        both = make_loss(Fault())

        def short(params: Any, rows: Any) -> Any:
            return both({**params, "middle": params["middle"]}, rows) if rows["long"] else _short(params, rows)

        step = fs.make_train_step(short, opt, plan)
        state, _ = step(state, {**batch(0, mesh.rank), "long": True})
        raised = attempt(lambda: step(state, {**batch(1, mesh.rank), "long": mesh.rank != 1}))
        state, metrics = step(state, {**batch(1, mesh.rank), "long": True})
        return raised, bool(torch.isfinite(metrics.loss))


def _short(params: Any, rows: Any) -> Any:
    return (rows["x"] @ params["first"]["w"].t()).square().mean(), {}


def test_a_rank_that_takes_another_branch(pool: Pools) -> None:
    for raised, good in pool(3).run(other_branch):
        assert good and raised is not None and "ScheduleError" in raised.kinds
        assert "rank 1: schedule" in raised.text


class Failing:
    """An optimizer that fails, before it writes or after."""

    def __init__(self, late: bool) -> None:
        self.inner, self.late, self.armed = fs.optim.sgd(0.05), late, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update(self, params: Any, *args: Any, **more: Any) -> None:
        """Fail once."""
        if self.armed:
            self.armed = False
            if self.late:
                params[0].mul_(2.0)
            raise MemoryError("in the optimizer")
        self.inner.update(params, *args, **more)


@pytest.mark.parametrize("late", [False, True])
def test_an_update_that_fails(late: bool) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    plan, _, _ = start(mesh)
    rule = Failing(late)
    states = [fs.init_state(plan, fs.optim.sgd(0.05), params=weights()) for _ in range(2)]
    step = fs.make_train_step(make_loss(Fault()), rule, plan)
    good = fs.make_train_step(make_loss(Fault()), fs.optim.sgd(0.05), plan)
    state, _ = step(states[0], batch(0, 0))
    want, _ = good(states[1], batch(0, 0))
    rule.armed = True  # the update of the first step, which waits for the second
    raised = attempt(lambda: step(state, batch(1, 0)))
    assert raised is not None
    if late:
        assert "StateError" in raised.kinds
        again = attempt(lambda: state.params)
        assert again is not None and "StateError" in again.kinds and "checkpoint" in again.text
        return
    assert "MemoryError" in raised.kinds
    state, _ = step(state, batch(2, 0))
    want, _ = good(want, batch(2, 0))
    assert torch.equal(state.params["middle"]["w"], want.params["middle"]["w"])
