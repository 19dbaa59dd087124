"""Outer steps against DiLoCo in one plain process, on played and on real ranks."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from tests.outer_steps.cases import (
    CASES,
    STEPS,
    Case,
    Flat,
    flat_of,
    plain,
    played,
    start,
    step_of,
    steps_of,
    trained,
    whole,
)
from tests.shared.workers import Pools
from tests.training.wire_cases import batch, loss_fn


def compare(case: Case, found: list[tuple[list[float], Flat, Flat]]) -> None:
    losses, params, anchor = plain(case)
    apart = [(a - b).abs().max() for a, b in zip(params[0].values(), params[-1].values(), strict=True)]
    assert max(apart) > 1e-4 or case.every == 1 or len(params) == 1
    for rank, (seen, own, shared) in enumerate(found):
        replica = rank // case.sizes[1]
        assert seen == pytest.approx(losses[replica], rel=1e-4)
        for path, leaf in anchor.items():
            torch.testing.assert_close(shared[path], leaf, rtol=1e-4, atol=2e-5, msg=lambda m, p=path: f"{p}: {m}")
            torch.testing.assert_close(own[path], params[replica][path], rtol=1e-4, atol=2e-5)
            assert torch.equal(shared[path], found[0][2][path])


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_training_equals_diloco_in_one_process(name: str) -> None:
    compare(CASES[name], played(CASES[name]))


def on_ranks(case: Case) -> Any:
    """On a rank of a process."""
    with fs.make_mesh(case.sizes, ("replica", "data")) as mesh:
        return trained(case, mesh)


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8, fragments under way", "optimizer state apart"])
def test_real_ranks_equal_played_ranks(pool: Pools, name: str) -> None:
    case = CASES[name]
    for (losses, own, anchor), (others, params, again) in zip(pool(4).run(on_ranks, case), played(case), strict=True):
        assert losses == others
        assert all(torch.equal(own[path], params[path]) and torch.equal(anchor[path], again[path]) for path in own)


ENDING = Case(every=3, fragments=3, delay=2)
"""A fragment leaves after every step, so two are under way at the end."""


def ends_apart(folder: str, case: Case, shared: bool, late: tuple[int, ...]) -> Any:
    """On a rank: late ones wait, with two steps left, until the others have closed their links."""
    closed = [Path(folder, f"closed {rank}") for rank in range(case.sizes[0]) if rank not in late]
    with fs.make_mesh(case.sizes, ("replica", "data"), shared_memory=shared) as mesh:
        rank, step = mesh.rank, step_of(case, mesh)
        state, losses = steps_of(step, fs.init_state(step.plan, step.opt, params=start()), 0, STEPS - 2)
        while rank in late and not all(path.exists() for path in closed):
            time.sleep(0.01)
        state, more = steps_of(step, state, STEPS - 2, STEPS)
        found = losses + more, *whole(step, state)
    Path(folder, f"closed {rank}").touch()
    return found


@pytest.mark.long
@pytest.mark.parametrize(("shared", "late"), [(True, (1, 2)), (False, (1,))], ids=["shared memory", "gloo"])
def test_the_last_steps_succeed_when_other_replicas_have_left(
    pool: Pools, tmp_path: Path, shared: bool, late: tuple[int, ...]
) -> None:
    """What was sent to a replica that waits for it arrives; what nobody waits for any more is no error."""
    case = dataclasses.replace(ENDING, sizes=(1 + len(late), 1))
    found = pool(case.sizes[0]).run(ends_apart, str(tmp_path), case, shared, late)
    for (losses, own, anchor), (others, params, again) in zip(found, played(case), strict=True):
        assert losses == others
        assert all(torch.equal(own[path], params[path]) and torch.equal(anchor[path], again[path]) for path in own)


def test_local_sgd_is_an_average() -> None:
    """After every step all replicas hold the mean of what they had."""
    case = CASES["local SGD"]
    for (_, own, anchor), (_, others, _) in zip(played(case, 3), reversed(played(case, 3)), strict=True):
        assert all(torch.equal(own[path], anchor[path]) and torch.equal(own[path], others[path]) for path in own)


def test_replicas_draw_numbers_of_their_own() -> None:
    """Rows, and random numbers inside of steps, are those of ranks of the whole mesh."""
    mesh, seen = fs.virtual_mesh((2, 2), ("replica", "data")), {}

    def main() -> Any:
        rank = mesh.rank

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                seen[rank] = float(x.sum()), float(torch.rand(()))
            return (params["w"] * x).sum()

        plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("replica", "data")))
        inner = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
        step = fs.outer(inner, fs.optim.sgd(1.0), every=2)
        rows = step.plan.local_batch(torch.arange(16.0).view(4, 4))
        assert torch.equal(rows, plan.local_batch(torch.arange(16.0).view(4, 4)))
        step(fs.init_state(step.plan, step.opt, params={"w": torch.ones(4)}), rows)

    mesh.run(main)
    assert len(set(seen.values())) == 4 and len({drawn for _, drawn in seen.values()}) == 4


MUON = fs.optim.partition([(r".*\.w", fs.optim.muon(0.02)), (r".*", fs.optim.adamw(0.01))])


@pytest.mark.parametrize("opt", [fs.optim.adamw(0.01), MUON], ids=["adamw", "muon"])
def test_one_replica_that_is_averaged_alone_trains_as_without(opt: Any) -> None:
    """Whatever optimizer is inside: the anchor follows, and moments are those of the inner steps."""
    mesh = fs.virtual_mesh((1, 2), ("replica", "data"))

    def main() -> Any:
        rules = [fs.Rule(".*", fs.fsdp("data"), align="leaf")]
        plan = fs.make_plan(start(), mesh, rules, batch=fs.P(("replica", "data")), units=("one", "two"))
        inner = fs.make_train_step(loss_fn, opt, plan)
        step = fs.outer(inner, fs.optim.sgd(1.0), every=2)
        alone, state = (fs.init_state(one.plan, one.opt, params=start()) for one in (inner, step))
        for number in range(4):
            alone, _ = inner(alone, batch(number, mesh.rank))
            state, _ = step(state, batch(number, mesh.rank))
        return [flat_of(fs.unshard(one.params, made.plan)) for one, made in ((alone, inner), (state, step))]

    plain, apart = mesh.run(main)[0]
    for path, leaf in plain.items():
        torch.testing.assert_close(apart[path], leaf, rtol=1e-5, atol=1e-6)


def test_what_travels_is_told() -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "data"))
    step = step_of(Case(every=8, wire="int8", fragments=4, delay=2), mesh)
    sizes = [fragment.nbytes for fragment in step._exchange.fragments]
    assert max(sizes) - min(sizes) <= 256 + 4
    text = step.exchanges
    assert "4 fragments every 8 steps in int8/256, which arrive 2 steps later" in text
    assert "fragment 2 of 4" in text and "leaves after steps 2, 10" in text
    groups = step.trace(tuple(torch.zeros(4, n) for n in (16, 8))).schedule.groups
    moves = [move for group in groups for move in group.transfers]
    assert [move.kind for move in moves if "replica" in move.axes] == ["exchange"] * 4
