"""Memory that really runs out, on one rank: in the program, in gradients, in the buffers of reductions."""

import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.faults.program import differing
from tests.workers import Pools

SIDE = 1024
"""Of three square matrices, 4 MB each."""


def _limit(slack: int) -> None:
    """Let this process take so many bytes more than it has, or again as many as it likes."""
    size = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + slack if slack >= 0 else hard, hard))


@fs.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A matrix."""
    return torch.tanh(x @ p["w"])


def starving(slacks: list[int]) -> tuple[list[str], int]:
    """On a rank: steps in which rank 1 has so little memory left for its backward; what is wrong, how many failed."""
    out, failed, limit = [], 0, [-1]
    names = ("a", "b", "c")
    params = {name: {"w": torch.eye(SIDE)} for name in names}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        held = torch.ones(4 * SIDE, 4 * SIDE)  # 64 MB, which the graph keeps for the backward
        for name in names:
            x = layer(p[name], x)
        if limit[0] >= 0:
            _limit(limit[0] + (64 << 20))  # the product, which is gone before the backward
        return x.square().mean() + 0.0 * (x.sum() * held).mean()

    with fs.make_mesh((-1,), ("shard",), timeout=20.0) as mesh:
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"), units=names)
        opt = fs.optim.sgd(0.1, momentum=0.9)
        state, want = (fs.init_state(plan, opt, params=params) for _ in range(2))
        step, good = fs.make_train_step(loss, opt, plan), fs.make_train_step(loss, opt, plan)
        state, _ = step(state, torch.ones(8, SIDE))
        want, _ = good(want, torch.ones(8, SIDE))
        for number, slack in enumerate(slacks):
            before = _copy(state)
            limit[0] = slack if mesh.rank == 1 else -1
            try:
                state, _ = step(state, torch.full((8, SIDE), 0.1 * number))
                want, _ = good(want, torch.full((8, SIDE), 0.1 * number))
            except (fs.errors.PeerError, RuntimeError, MemoryError) as error:
                failed += 1
                _limit(-1)
                kind = "PeerError" if mesh.rank == 0 else "alloc"
                out += [f"{slack}: {type(error).__name__}: {error}"] * (kind not in f"{type(error).__name__} {error}")
                out += [f"{slack} changed {name}" for name in differing(before, _copy(state))]
            limit[0] = -1
            _limit(-1)
            state, _ = step(state, torch.ones(8, SIDE))
            want, _ = good(want, torch.ones(8, SIDE))
            out += [f"{slack} left {name}" for name in differing(_copy(want), _copy(state))]
    return out, failed


def _copy(state: Any) -> dict[str, Any]:
    return {path: leaf.clone() for path, leaf in tree.paths({"params": state.params, "opt": state.opt_state})}


def test_memory_that_runs_out_in_a_backward(pool: Pools) -> None:
    slacks = [megabytes << 20 for megabytes in (0, 3, 6, 9, 12, 16)]
    for out, failed in pool(2).run(starving, slacks):
        assert not out, out
        assert failed


@pytest.mark.slow
def test_memory_that_runs_out_anywhere(pool: Pools) -> None:
    for out, failed in pool(2).run(starving, [megabytes << 19 for megabytes in range(48)], timeout=170.0):
        assert not out, out
        assert failed
