"""Ranks run a step alike: they tell each other in the handshake how they can."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from tests.device import cases
from tests.shared.capture_device import capturing
from tests.shared.workers import Pools

STEPS = 12


def weighted(p: Any, batch: Any) -> fs.Mean:
    """A loss of any number of rows."""
    loss = cases.loss(p, batch)
    return fs.Mean(loss * batch["x"].shape[0], batch["x"].shape[0])


def trained(policy: fs.Policy, rows: bool, fails: bool = False) -> tuple[list[float], list[str], list[Tensor]]:
    """Steps of real ranks, the last of which has fewer rows in one step, or cannot capture."""
    with capturing() as on, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh, device = on(fs.make_mesh((-1,), ("shard",), device="cpu"))
        last = mesh.rank == mesh.size - 1
        device.fails = 20 if fails and last else None
        plan, opt = cases.planned(mesh), fs.optim.adamw(2.0**-6)
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(weighted, opt, plan, schedule=policy, clip_norm=0.1)
        losses, how = [], []
        for number in range(STEPS):
            batch = cases.batch(number, mesh)
            if rows and last and number == 6:
                batch = {name: x[:1] for name, x in batch.items()}
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
            how.append(metrics.ran.graph)
        return losses, how, [leaf.clone() for leaf in fs.tree.leaves(fs.settle(state).params)]


def differing() -> str:
    """The error of ranks of which one captures and the other does not."""
    with capturing() as on:
        mesh, _ = on(fs.make_mesh((-1,), ("shard",), device="cpu"))
        plan, opt = cases.planned(mesh), fs.optim.adamw(2.0**-6)
        policy = fs.Policy(graph="step" if mesh.rank else "none")
        step = fs.make_train_step(weighted, opt, plan, schedule=policy)
        try:
            step(fs.init_state(plan, opt, params=cases.params()), cases.batch(0, mesh))
        except fs.errors.ReplicationError as error:
            return str(error)
    return ""


def same(pool: Pools, *options: bool, graph: str = "step") -> list[list[str]]:
    """How each rank ran, whose numbers are those of eager steps."""
    graphed = pool(2).run(trained, fs.Policy(graph=graph), *options)
    eager = pool(2).run(trained, fs.Policy(), *options)
    for (losses, _, params), (want, _, wanted) in zip(graphed, eager, strict=True):
        assert losses == want and all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))
    return [how for _, how, _ in graphed]


def dropped() -> tuple[int, int, str]:
    """The graphs of a rank before its communicators end, and after it; and how the next step runs."""
    with capturing() as on:
        mesh, _ = on(fs.make_mesh((-1,), ("shard",), device="cpu"))
        plan, opt = cases.planned(mesh), fs.optim.adamw(2.0**-6)
        step = fs.make_train_step(cases.loss, opt, plan, schedule=fs.Policy(graph="step"))
        state = fs.init_state(plan, opt, params=cases.params())
        for number in range(4):
            state, _ = step(state, cases.batch(number, mesh))
        runner = step._runner
        held = len(runner.held)  # type: ignore[attr-defined]
        mesh.transport.abort("collectives")
        left = len(runner.held)  # type: ignore[attr-defined]
        state, metrics = step(state, cases.batch(4, mesh))
        return held, left, metrics.ran.graph


def test_graphs_are_dropped_before_communicators_end(pool: Pools) -> None:
    for held, left, how in pool(2).run(dropped):
        assert (held, left) == (1, 0) and how.startswith("eager: the step is among the first")


@pytest.mark.parametrize("graph", ["step", "segments"])
def test_a_rank_with_another_batch_lets_all_run_eagerly(graph: str, pool: Pools) -> None:
    for number, how in enumerate(same(pool, True, graph=graph)):
        where = "" if number else "rank 1: "
        assert how[6] == f"eager: {where}the step is among the first with this program, batch and state"
        assert how[2] == "captured" and how[3:6] + how[7:] == ["replayed"] * 8


@pytest.mark.parametrize("graph", ["step", "segments"])
def test_a_capture_that_fails_on_a_rank_lets_all_run_eagerly(graph: str, pool: Pools) -> None:
    first, second = same(pool, False, True, graph=graph)
    assert first[2] == "eager: rank 1: its capture failed" and "operation not permitted" in second[2]
    assert set(first[3:]) == {first[2]} and set(second[3:]) == {second[2]}


def test_ranks_with_other_policies_are_told(pool: Pools) -> None:
    for error in pool(2).run(differing):
        assert "schedule.graph: rank 0: 'none', rank 1: 'step'" in error
