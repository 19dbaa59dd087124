"""Saves that write while steps run: what they hold, and what becomes of one that fails."""

import dataclasses
import os
import resource
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import CheckpointWarning
from fshard.runtime.comm import exchange_bytes
from fshard.state.entries import entries
from tests.checkpoint.test_checkpoint import OPT, contents, loss, plan_on, weights
from tests.shared.bad import Raised, alike, attempt
from tests.shared.workers import Pools


def overlapped(root: str) -> list[Any]:
    """Save, overwrite the state at once, save again, and look at what the checkpoints hold."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(root, keep=None, async_=True) as ckpt:
        state = fs.init_state(plan_on(mesh), OPT, params=weights())
        before = [entry.tensor.clone() for entry in entries(state)]
        for step in (1, 2):
            ckpt.save(dataclasses.replace(state, step=step))
            for entry in entries(state):
                entry.tensor.add_(1)
        ckpt.wait()
        equal = [
            [
                torch.equal(e.tensor, b + n)
                for e, b in zip(entries(ckpt.restore(state.plan, OPT, n + 1)), before, strict=True)
            ]
            for n in (0, 1)
        ]
        return [
            ckpt.steps(),
            all(map(all, equal)),
            "fshard-checkpoint" not in [thread.name for thread in threading.enumerate()],
        ]


def test_a_save_holds_the_state_of_its_call(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(overlapped, str(tmp_path)) == [[[1, 2], True, True]] * 2


def failing(root: str, async_: bool) -> list[Any]:
    """A save whose files one rank cannot write, and what the next calls say."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        ckpt = fs.Checkpointer(root, async_=async_)
        state = fs.init_state(plan_on(mesh), OPT, params=weights())
        state = dataclasses.replace(state, step=1)
        ckpt.save(state)
        ckpt.wait()
        step = fs.make_train_step(loss, OPT, state.plan)
        state, _ = step(state, torch.ones(4, 16))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if mesh.rank == 1 else limits[0], limits[1]))
        try:
            first = attempt(lambda: ckpt.save(state))
            second = attempt(ckpt.wait)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        left = sorted(os.listdir(root))
        state, _ = step(state, torch.ones(4, 16))
        ckpt.save(state)
        ckpt.close()
        return [first, second, left, ckpt.steps()]


@pytest.mark.parametrize("async_", [False, True])
def test_a_write_that_fails_on_one_rank_fails_on_all(pool: Pools, tmp_path: Path, async_: bool) -> None:
    ranks = pool(2).run(failing, str(tmp_path), async_)
    raised = [rank[async_] for rank in ranks]
    alike(raised, "CheckpointError", ("cannot write to", "step-00000002.tmp-", "File too large", "EFBIG"))
    assert [rank[not async_] for rank in ranks] == [None] * 2
    assert [rank[2:] for rank in ranks] == [[[".lock", "step-00000001"], [1, 3]]] * 2


def virtually(root: str) -> list[int]:
    """On the ranks of a virtual mesh."""
    mesh = fs.make_mesh((-1,), ("shard",))
    state = fs.init_state(plan_on(mesh), OPT, params=weights())
    with fs.Checkpointer(root, async_=True) as ckpt:
        for step in (1, 2):
            ckpt.save(dataclasses.replace(state, step=step))
    again = fs.Checkpointer(root).restore(plan_on(mesh), OPT)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(entries(state), entries(again), strict=True))
    return ckpt.steps()


def test_ranks_that_are_threads_save_too(tmp_path: Path) -> None:
    assert fs.virtual_mesh((3,), ("shard",)).run(virtually, str(tmp_path)) == [[1, 2]] * 3
    before = contents(tmp_path)
    state = fs.Checkpointer(tmp_path).restore(plan_on(fs.make_mesh((-1,), ("shard",))), OPT)
    assert state.step == 2 and contents(tmp_path) == before


def damaged_newest(root: str) -> list[Any]:
    """Restore with and without a fallback, train on, and save over the damaged step."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(root) as ckpt:
        plan = plan_on(mesh)
        error = attempt(lambda: ckpt.restore(plan, OPT))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = ckpt.restore(plan, OPT, fallback=True)
        told = [str(w.message) for w in caught if w.category is CheckpointWarning]
        assert ckpt.restored is not None
        found = [state.step, ckpt.restored.step, len(ckpt.restored.skipped), told[0].partition(":")[0]]
        state = dataclasses.replace(state, step=2)
        ckpt.save(state)
        return [error, found, fs.Checkpointer(root).restore(plan, OPT).step]


def test_a_damaged_newest_step_is_passed_over_and_replaced(pool: Pools, tmp_path: Path) -> None:
    from tests.checkpoint.test_checkpoint import saves

    pool(2).run(saves, str(tmp_path), 3, [1, 2])
    file = tmp_path / "step-00000002" / "rank-00001-000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ranks = pool(2).run(damaged_newest, str(tmp_path))
    errors: list[Raised | None] = [rank[0] for rank in ranks]
    alike(errors, "DamagedError", (f"{file} is damaged", "have the SHA-256", "fallback=True"))
    assert [rank[1:] for rank in ranks] == [[[1, 1, 1, "step 2 was skipped"], 2]] * 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000001", "step-00000002"]


def exchanged(sizes: list[int]) -> list[bool]:
    """Bytes of these lengths, a different one on each rank."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        comm = mesh.transport.communicator("control", ("shard",))
        out = []
        for shift in range(len(sizes)):
            want = [bytes([rank + 1]) * sizes[(rank + shift) % len(sizes)] for rank in range(mesh.size)]
            out.append(exchange_bytes(comm, want[mesh.rank]) == want)
        return out


def test_bytes_of_any_length_reach_all_ranks(pool: Pools) -> None:
    assert pool(2).run(exchanged, [0, 1, 1015, 1016, 1017, 5000]) == [[True] * 6] * 2
