"""A played rank that gives up: others that wait learn why, its own error is raised, and the next step is good."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.collectives import psum, use_mesh
from fshard.errors import CommError, PeerError
from fshard.played.lives import Lives
from tests.device import cases
from tests.shared.summed import Summed

THREE = fs.virtual_mesh((3,), ("shard",))


def tried(body: Callable[[], Any]) -> str:
    """What a call came to: a number, or its error."""
    try:
        return f"{body():.4f}"
    except (ValueError, CommError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def planned(mesh: fs.Mesh) -> tuple[fs.Plan, Any]:
    """A plan of one leaf, and its state."""
    params = {"w": torch.ones(6)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
    return plan, fs.init_state(plan, fs.optim.sgd(0.1), params=params)


def steps(bad: int) -> list[str]:
    """A good step, one that a rank fails before its collective, twice, and a good one; then a collective outside."""
    mesh, loss = fs.make_mesh((3,), ("shard",)), Summed()
    plan, state = planned(mesh)
    step, out = fs.make_train_step(loss, fs.optim.sgd(0.1), plan), []

    def one() -> float:
        nonlocal state
        state, metrics = step(state, torch.ones(2, 6))
        return metrics.loss.item()

    for number in range(4):
        loss.bad = number in (1, 2) and mesh.rank == bad
        out.append(tried(one))
        out.append(tried(lambda: psum(torch.ones(()), "shard", mesh=mesh).item()))
    return out


@pytest.mark.parametrize("bad", range(3))
def test_the_error_of_a_rank_is_told_to_ranks_that_wait_in_a_collective(bad: int) -> None:
    for rank, seen in enumerate(THREE.run(steps, bad)):
        assert seen[1::2] == ["3.0000"] * 4
        assert seen[0] == "1.0000" and seen[6][0].isdigit()
        for failed in (seen[2], seen[4]):
            assert failed.startswith("ValueError" if rank == bad else "PeerError") and "no data here" in failed


def test_a_rank_that_fails_in_a_step_raises_its_own_error() -> None:
    def rank() -> None:
        mesh, loss = fs.make_mesh((3,), ("shard",)), Summed()
        plan, state = planned(mesh)
        loss.bad = mesh.rank == 2
        fs.make_train_step(loss, fs.optim.sgd(0.1), plan)(state, torch.ones(2, 6))

    with pytest.raises(ValueError, match="no data here"):
        THREE.run(rank)


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_fails_before_a_norm_of_the_others(inside: bool) -> None:
    """In a step of parts, whose norm is an exchange of its own; and where the rank fails outside of any step."""

    def rank() -> None:
        mesh = fs.make_mesh((3,), ("shard",))
        plan, state = planned(mesh)
        grad = fs.value_and_grad(lambda p, x: (p["w"] * x).square().mean(), plan)

        def fn(state: Any, batch: Tensor) -> Any:
            _, grads = grad(state.params, batch)
            if mesh.rank == 1 and armed:
                raise ValueError("no data here")
            return state, {"norm": fs.tree.norm(grads, plan)}

        armed = False
        step = fs.make_step(fn, plan)
        state, _ = step(state, torch.ones(2, 6))
        armed = True
        if inside:
            step(state, torch.ones(2, 6))
        if mesh.rank == 1:
            raise ValueError("no data here")
        fs.tree.norm(state.params, plan)

    with pytest.raises(ValueError, match="no data here"):
        THREE.run(rank)


def test_blocks_that_an_exception_leaves() -> None:
    def rank() -> list[str]:
        mesh, out = fs.make_mesh((3,), ("shard",)), []

        def block(bad: bool) -> float:
            with use_mesh(mesh):
                first = psum(torch.ones(()), "shard")
                if bad and mesh.rank == 0:
                    raise ValueError("no data here")
                return (first + psum(torch.ones(()), "shard")).item()

        for bad in (False, True, False):
            out.append(tried(lambda bad=bad: block(bad)))
        return out

    first, *others = THREE.run(rank)
    assert first == ["6.0000", "ValueError: no data here", "6.0000"]
    for seen in others:
        assert seen[::2] == ["6.0000"] * 2
        assert seen[1].startswith("CommError") and "rank 0 gave up: ValueError: no data here" in seen[1]


def test_a_life_ends_once() -> None:
    lives = Lives()
    assert lives.join("a", 0) == lives.join("a", 1) == 0
    lives.end("a", 0, "first")
    lives.end("a", 0, "second")
    lives.end("b", 0, "not in use")
    assert lives.gone("a", 0, (0, 1)) == "rank 0 gave up: first" and lives.join("a", 0) == 1
    assert not lives.gone("a", 0, (1, 2)) and not lives.gone("b", 0, (0, 1)) and not lives.gone("a", 1, (0, 1))


def test_modes_of_the_rank_that_comes_last_do_not_see_the_copies_for_all() -> None:
    """Selective checkpointing counts operators, and which rank comes last differs between forward and backward."""
    remat = fs.checkpoint_policies.dots
    got = cases.on("cpu", 3, lambda mesh: cases.trained(mesh, cases.named, remat=remat))
    want = cases.on("cpu", 3, lambda mesh: cases.trained(mesh, cases.named))
    assert not cases.apart(got, want)
