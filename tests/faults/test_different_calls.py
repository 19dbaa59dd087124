"""Ranks that are at different calls: each raises an error that says what every rank was calling, and where."""

import contextlib
import random
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import collectives as fc
from tests.shared.bad import Raised, attempt, place, rule, weights
from tests.shared.workers import Pool, Pools

pytestmark = pytest.mark.processes

TIMEOUT, LONG = 2.0, 30.0
"""Seconds that ranks wait where no message can tell them, and where one does."""

AT_ONCE = {
    "train step": "train step",
    "evaluation": "evaluation step",
    "sharded loss": "sharded loss",
    "unshard": "fs.unshard",
    "save": "Checkpointer.save",
    "restore": "Checkpointer.restore",
    "move": "fs.reshard_state",
    "buffers": "fs.sync_buffers",
    "export": "fs.io.export",
}
"""Calls of the library that begin on the control communicator, and what errors call them."""

BY_TIME = {"psum": "fs.psum"}
"""Calls that begin on another one."""


def loss(params: Any, rows: torch.Tensor) -> torch.Tensor:
    """Of three matrices."""
    x = rows @ params["first"]["w"].t() + params["first"]["b"]
    x = torch.tanh(x @ params["middle"]["w"].t())
    return (x @ params["last"]["w"].t() + params["last"]["b"]).square().mean()


def calls_of(mesh: fs.Mesh, folder: str) -> dict[str, Callable[[], Any]]:
    """Every collective call, ready to be made."""
    plan, opt = place(mesh), rule()
    state = fs.init_state(plan, opt, params=weights())
    step = fs.make_train_step(loss, opt, plan, donate=False)
    evaluate = fs.make_eval_step(loss, plan)
    sharded = fs.func.sharded_loss(loss, plan)
    rows = torch.ones(4, 6) * (1 + mesh.rank)
    other = plan.replace(rules=[(".*", fs.P())])
    checkpoints = fs.Checkpointer(folder)
    return {
        "train step": lambda: step(state, rows),
        "evaluation": lambda: evaluate(state, rows),
        "sharded loss": lambda: sharded(state.params, rows),
        "unshard": lambda: fs.unshard(state.params, plan),
        "save": lambda: checkpoints.save(state, overwrite=True),
        "restore": lambda: checkpoints.restore(plan, opt),
        "move": lambda: fs.reshard_state(state, other, opt),
        "buffers": lambda: fs.sync_buffers({"a": torch.ones(1)}, plan),
        "export": lambda: list(fs.io.export(state.params, plan)),
        "psum": lambda: fc.psum(torch.ones(1), "shard", mesh=mesh),
    }


def drawn(cases: list[tuple[str, ...]], folder: str, timeout: float) -> list[tuple[Raised | None, float]]:
    """On a rank: what each case raises, and after how many seconds; then all ranks make the same calls."""
    with fs.make_mesh((-1,), ("shard",), timeout=timeout) as mesh:
        calls = calls_of(mesh, folder)
        for name in AT_ONCE:
            if name != "restore":
                calls[name]()
        out = []
        for case in cases:
            began = time.monotonic()
            out.append((attempt(calls[case[mesh.rank]]), time.monotonic() - began))
        if timeout == LONG:
            for name in AT_ONCE:
                calls[name]()
    return out


def told(raised: Raised | None, case: tuple[str, ...]) -> None:
    """The error names what each rank was calling, and the file and line of it."""
    assert raised is not None and "ShardError" in raised.kinds, (case, raised)
    for rank, name in enumerate(case):
        call = re.escape((AT_ONCE | BY_TIME)[name])
        assert re.search(rf"rank {rank}: .*{call}, \S*test_different_calls\.py:\d+", raised.text), (case, raised.text)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_at_different_calls_learn_it_at_once(pool: Pools, world: int) -> None:
    draw = random.Random(world)
    cases = [tuple(draw.sample(list(AT_ONCE), world)) for _ in range(25)]
    with tempfile.TemporaryDirectory() as folder:
        results = pool(world).run(drawn, cases, folder, LONG)
    for case, *ranks in zip(cases, *results, strict=True):
        texts = {raised.text if raised else "" for raised, _ in ranks}
        assert len(texts) == 1, (case, texts)
        for raised, seconds in ranks:
            told(raised, case)
            assert raised is not None and "ScheduleError" in raised.kinds and seconds < LONG


MIXED = [("psum", "train step"), ("unshard", "psum"), ("psum", "save")]


@pytest.mark.parametrize("case", [MIXED[0], *(pytest.param(c, marks=pytest.mark.slow) for c in MIXED[1:])])
def test_ranks_that_wait_on_different_communicators_learn_it_in_time(case: tuple[str, str]) -> None:
    own = Pool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for ((raised, seconds),) in own.run(drawn, [case], folder, TIMEOUT):
                told(raised, case)
                assert seconds < TIMEOUT + 5
    finally:
        own.kill()


def waits(seconds: float) -> tuple[str, Raised | None]:
    """On a rank: rank 0 comes late; what the other one says meanwhile."""
    import io

    out = io.StringIO()
    with fs.make_mesh((-1,), ("shard",), timeout=60.0) as mesh, contextlib.redirect_stderr(out):
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())
        fs.unshard(state.params, plan)
        if mesh.rank == 0:
            time.sleep(seconds)
        raised = attempt(lambda: fs.unshard(state.params, plan))
    return out.getvalue(), raised


@pytest.mark.slow
def test_after_ten_seconds_one_line_says_who_waits_for_whom(pool: Pools) -> None:
    (first, _), (second, raised) = pool(2).run(waits, 14.0)
    assert raised is None and first == ""
    assert second.count("\n") == 1 and "rank 1 has waited 10 s for rank 0" in second
    assert re.search(r"fs\.unshard, \S*test_different_calls\.py:\d+", second), second


def other_programs() -> list[Raised | None]:
    """On a rank: rank 0 alone calls psum in its loss; then it alone calls fewer units."""
    with fs.make_mesh((-1,), ("shard",), timeout=LONG) as mesh:
        plan, opt = place(mesh), rule()
        state = fs.init_state(plan, opt, params=weights())
        rows = torch.ones(4, 6)

        def talks(params: Any, rows: torch.Tensor) -> torch.Tensor:
            value = loss(params, rows)
            return fc.pmean(value, "shard") if mesh.rank == 0 else value

        def less(params: Any, rows: torch.Tensor) -> torch.Tensor:
            return (rows @ params["first"]["w"].t()).sum() if mesh.rank == 0 else loss(params, rows)

        out = []
        for fn in (talks, less):
            step = fs.make_train_step(fn, opt, plan, donate=False)
            out.append(attempt(lambda step=step: step(state, rows)))  # type: ignore[misc]
        fs.make_train_step(loss, opt, plan)(state, rows)
        return out


def test_a_loss_that_differs_is_told_by_its_first_difference(pool: Pools) -> None:
    for talks, less in pool(2).run(other_programs):
        for raised in (talks, less):
            assert raised is not None and "ScheduleError" in raised.kinds
            assert re.search(
                r"rank 1: schedule .*train step, \S*test_different_calls\.py:\d+: '.*' where rank 0 has", raised.text
            )
        assert (
            "'collectives of the program over no axis' where rank 0 has 'collectives of the program over shard'"
            in talks.text
        )
