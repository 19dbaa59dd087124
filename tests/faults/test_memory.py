"""Memory that really runs out, on one rank: in the backward, in gradients, in the buffers of reductions."""

import ctypes
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from fshard.runtime.steps.failures import starved
from tests.faults.program import differing
from tests.shared.workers import Pools

pytestmark = pytest.mark.processes

SIDE = 1024
"""Of three square matrices, 4 MB each."""

BLOCK = 4 * SIDE**2

ROOM = 2 << 20
"""Bytes that stay when no further matrix fits: for Python, and for telling the other rank."""

HELD = 64 << 20
"""Bytes that the graph keeps for the first unit's backward. Once that is over or has failed, reductions have them."""

HUGE = 4 << 30
"""Bytes that nobody has in store; they are never touched."""

NAMES = ("a", "b", "c")


def _limit(slack: int) -> None:
    """Let this process write to so many bytes more than it has, or again to as many as it likes.

    Addresses that are merely reserved do not count: the heap of each thread has 64 MB of them, which glibc hands out
    when nothing more can be mapped.
    """
    size = int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size + slack if slack >= 0 else hard, hard))


@fs.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A matrix."""
    return torch.tanh(x @ p["w"])


class Starved(torch.autograd.Function):
    """The identity; from its backward on, this process may take `slack` bytes more, of which `need` are asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: torch.Tensor | None, slack: int, need: int) -> torch.Tensor:
        """Of `x`: `x`."""
        ctx.held, ctx.slack, ctx.need = held, slack, need
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient as it came, if there is memory for it."""
        if ctx.slack >= 0:
            _limit(ctx.slack)
            torch.empty(ctx.need, dtype=torch.uint8)
        return grads[0], None, None, None


def starving(cases: list[tuple[str, int, int]]) -> tuple[list[str], list[int]]:
    """On a rank: steps in which rank 1 has so little memory left from a unit's backward on.

    Args:
        cases: the unit, the bytes left, and how many of them are asked for at once.

    Returns:
        What is wrong, and the numbers of the cases that failed.
    """
    out: list[str] = []
    failed: list[int] = []
    limits: dict[str, tuple[int, int]] = {}
    params = {name: {"w": torch.eye(SIDE)} for name in NAMES}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            held = torch.empty(HELD, dtype=torch.uint8) if name == NAMES[0] else None
            x = Starved.apply(layer(p[name], x), held, *limits.get(name, (-1, 0)))  # type: ignore[no-untyped-call]
        return x.square().mean()

    with fs.make_mesh((-1,), ("shard",), timeout=20.0) as mesh:
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"), units=NAMES)
        opt = fs.optim.sgd(0.1, momentum=0.9)
        state, want = (fs.init_state(plan, opt, params=params) for _ in range(2))
        step, good = fs.make_train_step(loss, opt, plan), fs.make_train_step(loss, opt, plan)
        state, _ = step(state, torch.ones(8, SIDE))
        want, _ = good(want, torch.ones(8, SIDE))
        for number, (unit, slack, need) in enumerate(cases):
            before, batch, raised = _copy(state), torch.full((8, SIDE), 0.1 * number), None
            limits.update({unit: (slack, need)} if mesh.rank == 1 else {})
            try:
                state, _ = step(state, batch)
            except (fs.errors.PeerError, RuntimeError, MemoryError) as error:
                raised = error
            limits.clear()
            _limit(-1)
            if raised is None:
                want, _ = good(want, batch)
            else:
                failed.append(number)
                known = starved(raised) if mesh.rank else isinstance(raised, fs.errors.PeerError)
                out += [f"{number}: {type(raised).__name__}: {raised}"] * (not known)
                out += [f"{number} changed {name}" for name in differing(before, _copy(state))]
            state, _ = step(state, torch.ones(8, SIDE))
            want, _ = good(want, torch.ones(8, SIDE))
            out += [f"{number} left {name}" for name in differing(_copy(want), _copy(state))]
    return out, failed


def starving_to_the_byte(cases: list[tuple[str, int, int]]) -> tuple[list[str], list[int]]:
    """The same in a process whose heap keeps no block of 1 MB or more in store, so that all count against the limit."""
    libc, threshold = ctypes.CDLL(None), -3  # glibc's M_MMAP_THRESHOLD
    assert libc.mallopt(threshold, 1 << 20)
    libc.malloc_trim(0)
    return starving(cases)


def _copy(state: Any) -> dict[str, Any]:
    return {path: leaf.clone() for path, leaf in tree.paths({"params": state.params, "opt": state.opt_state})}


def test_memory_that_runs_out_in_a_backward(pool: Pools) -> None:
    for out, failed in pool(2).run(starving, [(name, ROOM, HUGE) for name in NAMES]):
        assert not out, out
        assert failed == [0, 1, 2]


@pytest.mark.slow
def test_memory_that_runs_out_anywhere(pool: Pools) -> None:
    cases = [(name, ROOM + count * BLOCK, 0) for name in NAMES[1:] for count in range(12)]
    pool(2).kill()  # new processes have nothing in store yet
    try:
        runs = pool(2).run(starving_to_the_byte, cases, timeout=170.0)
    finally:
        pool(2).kill()  # its heap is not as others expect it
    for out, failed in runs:
        assert not out, out
        assert {0, 12} <= {*failed} < {*range(24)}, failed
