"""A rank that raises outside of train steps: ranks that wait for it learn at once that it will not come, and why."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.collectives import psum
from tests.faults.program import Fault, batch, make_loss, start
from tests.shared.bad import Raised, attempt
from tests.shared.workers import Pool, Pools

pytestmark = pytest.mark.processes

LONG = 25.0
"""Seconds that ranks wait. Nobody has to."""

AFTER = torch.ones(3)


def regions(mesh: fs.Mesh, fault: list[bool]) -> dict[str, Callable[[], Any]]:
    """Calls between two collectives of which a rank may raise."""

    def total(x: torch.Tensor) -> torch.Tensor:
        x = psum(x, "shard")
        if fault[0]:
            raise ValueError("it does not like this")
        return psum(x * x, "shard")

    def used() -> torch.Tensor:
        with fs.collectives.use_mesh(mesh):
            return total(AFTER)

    def loss(params: Any, rows: Any) -> torch.Tensor:
        return total(layer(params["first"], rows["x"]).mean())

    plan, opt, state = start(mesh)
    evaluate = fs.make_eval_step(loss, plan)
    f, rows = fs.func.sharded_loss(loss, plan), batch(0, mesh.rank)
    return {
        "shard_map": lambda: fs.shard_map(total, mesh, fs.P(), fs.P())(AFTER),
        "use_mesh": used,
        "sharded_loss": lambda: f(state.params, rows),
        "grad": lambda: torch.func.grad(f)(state.params, rows)["first"]["w"],
        "evaluate": lambda: evaluate(state, rows),
    }


@fs.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A matrix."""
    return torch.nn.functional.linear(x, p["w"], p["b"])


def failing(gloo: bool, names: Sequence[str]) -> list[tuple[str, Raised | None, bool, float]]:
    """On a rank: in each of these regions rank 1 raises between two collectives; then all go on."""
    out = []
    with fs.make_mesh((-1,), ("shard",), timeout=LONG, shared_memory=not gloo) as mesh:
        fault = [False]
        calls = regions(mesh, fault)
        for name in names:
            call = calls[name]
            want = call()
            fault[0] = mesh.rank == 1
            began = time.monotonic()
            raised = attempt(call)
            seconds, fault[0] = time.monotonic() - began, False
            out.append((name, raised, torch.equal(call(), want), seconds))
    return out


REGIONS = ("shard_map", "use_mesh", "sharded_loss", "grad", "evaluate")


@pytest.mark.parametrize(
    ("gloo", "names"),
    [
        pytest.param(False, REGIONS, id="shared memory"),
        pytest.param(True, ("use_mesh",), id="gloo"),
        pytest.param(True, REGIONS, id="gloo, all", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_between_collectives(pool: Pools, gloo: bool, names: Sequence[str]) -> None:
    for rank, cases in enumerate(pool(3).run(failing, gloo, names)):
        assert len(cases) == len(names)
        for name, raised, again, seconds in cases:
            assert raised is not None and again and seconds < LONG, (name, raised, again, seconds)
            assert "ValueError" in raised.text or rank == 1, (name, raised.text)
            assert "it does not like this" in raised.text, (name, raised.text)
            if rank == 1:
                assert "ValueError" in raised.kinds, (name, raised)
            else:
                assert "rank 1" in raised.text and {"CommError", "PeerError"} & {*raised.kinds}, (name, raised)
                if name in ("shard_map", "use_mesh"):
                    assert "on collectives(shard) failed" in raised.text, raised.text


def leaving(gloo: bool) -> tuple[Raised | None, float]:
    """On a rank: rank 1 leaves the mesh by an exception, while others wait for it in a step."""
    began = 0.0

    def train() -> None:
        nonlocal began
        with fs.make_mesh((-1,), ("shard",), timeout=LONG, shared_memory=not gloo) as mesh:
            plan, opt, state = start(mesh)
            step = fs.make_train_step(make_loss(Fault()), opt, plan)
            state, _ = step(state, batch(0, mesh.rank))
            began = time.monotonic()
            if mesh.rank == 1:
                raise FileNotFoundError("no more data")
            step(state, batch(1, mesh.rank))

    raised = attempt(train)
    return raised, time.monotonic() - began


@pytest.mark.parametrize("gloo", [False, True])
def test_a_rank_that_leaves_the_mesh_says_why(gloo: bool) -> None:
    own = Pool(3, LONG)  # whose ranks are out of step
    try:
        for rank, (raised, seconds) in enumerate(own.run(leaving, gloo)):
            assert raised is not None and seconds < LONG
            if rank != 1:
                assert "op 0 of" in raised.text and "no more data" in raised.text, raised.text
                assert "CommError" in raised.kinds and "FileNotFoundError" in raised.text, raised
    finally:
        own.kill()
