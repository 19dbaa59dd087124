"""Checkpoints of replicas that train apart: resumed bit for bit, fragments under way, other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from tests.outer_steps.cases import CASES, Case, Flat, flat_of, start, step_of, steps_of, whole
from tests.shared.workers import Pools

CASE = Case(every=4, wire="int4", fragments=2, delay=2)
SAVED = 5
"""The step of the checkpoint, at which a fragment is under way."""


def begun(case: Case, folder: str, mesh: fs.Mesh) -> tuple[list[float], Flat, Flat]:
    """On a rank: steps, a checkpoint in between."""
    step = step_of(case, mesh)
    state, _ = steps_of(step, fs.init_state(step.plan, step.opt, params=start()), 0, SAVED)
    fs.Checkpointer(folder).save(state)
    state, losses = steps_of(step, state, SAVED, SAVED + 4)
    return losses, *whole(step, state)


def resumed(case: Case, folder: str, mesh: fs.Mesh, steps: int = 4) -> tuple[list[float], Flat, Flat]:
    """On a rank: the rest of them from the checkpoint."""
    step = step_of(case, mesh)
    state = fs.Checkpointer(folder).restore(step.plan, step.opt)
    state, losses = steps_of(step, state, SAVED, SAVED + steps)
    return losses, *whole(step, state)


def same(one: Flat, other: Flat) -> bool:
    return all(torch.equal(leaf, other[path]) for path, leaf in one.items())


@pytest.mark.long
@pytest.mark.parametrize("case", [CASE, CASES["optimizer state apart"]], ids=["under way", "optimizer state apart"])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, case: Case) -> None:
    folder, mesh = str(tmp_path / "run"), fs.virtual_mesh((2, 2), ("replica", "data"))
    first: Any = mesh.run(lambda: begun(case, folder, mesh))
    then: Any = mesh.run(lambda: resumed(case, folder, mesh))
    for (losses, own, anchor), (again, params, shared) in zip(first, then, strict=True):
        assert losses == again and same(own, params) and same(anchor, shared)
    assert same(first[0][1], first[2][1]) == (case.delay == 0)


def on_ranks(case: Case, folder: str, again: bool) -> Any:
    with fs.make_mesh((2, 1), ("replica", "data"), shared_memory=False) as mesh:
        return (resumed if again else begun)(case, folder, mesh)


@pytest.mark.long
def test_it_is_on_real_ranks(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first, then = (pool(2).run(on_ranks, CASE, folder, again) for again in (False, True))
    for (losses, own, anchor), (again, params, shared) in zip(first, then, strict=True):
        assert losses == again and same(own, params) and same(anchor, shared)


def test_replicas_on_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    """Each with what it had, and with the fragment that was under way."""
    folder = str(tmp_path / "run")
    few, many = fs.virtual_mesh((2, 1), ("replica", "data")), fs.virtual_mesh((2, 3), ("replica", "data"))
    few.run(lambda: begun(CASE, folder, few))
    alone: Any = few.run(lambda: resumed(CASE, folder, few, 0))
    apart: Any = many.run(lambda: resumed(CASE, folder, many, 0))
    for rank, (_, own, anchor) in enumerate(apart):
        assert same(own, alone[rank // 3][1]) and same(anchor, alone[0][2])

    def anchors(mesh: fs.Mesh) -> Flat:
        step = step_of(CASE, mesh)
        state = fs.Checkpointer(folder).restore(step.plan, step.opt)
        for _ in (SAVED, SAVED + 1):  # the fragment left after step 4 and arrives after step 6
            rows = torch.zeros(4, 16), torch.zeros(4, 8)
            state, _ = step(state, rows)
        return whole(step, state)[1]

    want, got = few.run(lambda: anchors(few))[0], many.run(lambda: anchors(many))[0]
    assert same(want, got) and not same(want, alone[0][2])


def test_a_replica_that_comes_back_starts_from_the_anchor(tmp_path: Path) -> None:
    """The others go on from where they were; one that left takes nothing with it."""
    folder = str(tmp_path / "run")
    two, three, one = (fs.virtual_mesh((n, 1), ("replica", "data")) for n in (2, 3, 1))
    two.run(lambda: begun(CASE, folder, two))
    before: Any = two.run(lambda: resumed(CASE, folder, two, 0))

    def look() -> Any:
        step = step_of(CASE, three)
        state = fs.Checkpointer(folder).restore(step.plan, step.opt)
        moments = {name: flat_of(fs.unshard(tree, step.plan)) for name, tree in state.opt_state.items()}
        steps_of(step, state, SAVED, SAVED + 4)
        return flat_of(fs.unshard(fs.Checkpointer(folder).restore(step.plan, step.opt).params, step.plan)), moments

    after: Any = three.run(look)
    assert all(same(after[replica][0], before[replica][1]) for replica in (0, 1))
    assert same(after[2][0], before[0][2])
    assert same(after[2][1]["exp_avg"], after[0][1]["exp_avg"])
    assert all(not leaf.any() for leaf in after[2][1]["delta"].values())
    assert any(leaf.any() for leaf in after[0][1]["delta"].values())
    assert same(one.run(lambda: resumed(CASE, folder, one, 0))[0][1], before[0][1])


def test_the_anchor_can_be_read_alone(tmp_path: Path) -> None:
    """By any plan, for evaluation or to go on without replicas."""
    folder, mesh = str(tmp_path / "run"), fs.virtual_mesh((2, 1), ("replica", "data"))
    mesh.run(lambda: begun(CASE, folder, mesh))
    anchor: Any = mesh.run(lambda: resumed(CASE, folder, mesh, 0))[0][2]
    plan = fs.make_plan(start(), fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    rules = [(r"params\.(.*)", r"opt.anchor.\1")]
    state = fs.Checkpointer(folder).restore(plan, rules=rules)
    assert same(flat_of(fs.unshard(state.params, plan)), anchor)


def test_the_train_loop_resumes_and_stops_all_replicas_together(tmp_path: Path) -> None:
    folder, mesh = str(tmp_path / "run"), fs.virtual_mesh((2, 1), ("replica", "data"))

    def rows(number: int) -> Any:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(4, 16, generator=draw), torch.randn(4, 8, generator=draw)

    def main(end: int) -> Any:
        step = step_of(CASE, mesh)
        checkpoints = fs.Checkpointer(folder, every=3)
        begin = lambda: fs.init_state(step.plan, step.opt, params=start())  # noqa: E731
        found = [s.step for s, _ in fs.train_loop(step, begin, rows, steps=end, checkpoints=checkpoints)]
        return found, checkpoints.steps()

    assert mesh.run(lambda: main(4)) == [([1, 2, 3, 4], [3, 4])] * 2
    assert mesh.run(lambda: main(7)) == [([5, 6, 7], [4, 6, 7])] * 2

    def asked() -> list[int]:
        """Rank 1 asks in its first step: all hear of it when the fragment arrives that leaves after step 2."""
        step = step_of(CASE, mesh)
        state, out = fs.init_state(step.plan, step.opt, params=start()), []
        for number in range(6):
            state, metrics = step(state, rows(number), stop=mesh.rank == 1 and number == 0)
            out += [state.step] if metrics.stop else []
        return out

    assert mesh.run(asked) == [[4], [4]]
