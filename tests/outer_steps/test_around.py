"""What else takes states and steps of replicas that train apart: ``fs.verify``, other plans, exports, meshes."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fshard as fs
from fshard import P
from fshard.cli.main import main as command
from tests.outer_steps.cases import CASES, Case, Flat, flat_of, start, step_of, steps_of, whole
from tests.outer_steps.test_resumed import same
from tests.shared.bad import attempt
from tests.training.wire_cases import batch

pytestmark = pytest.mark.long

CASE = Case(every=2, wire="int8", fragments=2, delay=1)
"""One fragment is under way after every step."""


def meshes() -> fs.Mesh:
    return fs.virtual_mesh((2, 2), ("replica", "data"))


def begun(case: Case, mesh: fs.Mesh, steps: int = 3) -> tuple[Any, fs.TrainState]:
    """On a rank: the step, and a state after some."""
    step = step_of(case, mesh)
    return step, steps_of(step, fs.init_state(step.plan, step.opt, params=start()), 0, steps)[0]


@pytest.mark.parametrize("name", ["DiLoCo", "optimizer state apart"])
def test_verify_compares_the_inner_step_of_each_replica(name: str) -> None:
    mesh = meshes()

    def main() -> Any:
        step, state = begun(CASES[name], mesh)
        seen = fs.verify(step, state, batch(3, mesh.rank))
        after, _ = steps_of(step, state, 3, 5)  # the state is as it was
        return str(seen), whole(step, after)

    plain = mesh.run(
        lambda: whole(*(lambda step, state: (step, steps_of(step, state, 3, 5)[0]))(*begun(CASES[name], mesh)))
    )
    for (text, after), want in zip(mesh.run(main), plain, strict=True):
        assert "params.one.w" in text and "equal" in text and "opt.anchor.one.w" in text
        assert all(same(one, other) for one, other in zip(after, want, strict=True))


def test_a_state_goes_on_with_another_plan() -> None:
    """Replicated in a replica, and with leaves that are frozen; a fragment is under way."""
    mesh = meshes()

    def main() -> Any:
        step, state = begun(CASE, mesh)
        there = fs.reshard_state(state, step.plan, step.opt)
        other = step_of(Case(**{**vars(CASE), "spec": P()}), mesh)
        moved = fs.reshard_state(state, other.plan, other.opt)
        values = [whole(step, state), whole(step, there), whole(other, moved)]
        ends = [whole(made, steps_of(made, one, 3, 6)[0]) for made, one in ((step, there), (other, moved))]
        assert all(same(one, first) for value in values[1:] for one, first in zip(value, values[0], strict=True))
        refused = attempt(lambda: fs.reshard_state(state, _all_ranks(mesh), fs.optim.adamw(0.01)))
        return ends, refused.text if refused is not None else ""

    for (apart, moved), refused in mesh.run(main):
        for one, other in zip(apart, moved, strict=True):
            for path, leaf in one.items():
                torch.testing.assert_close(other[path], leaf, rtol=1e-5, atol=1e-6)
        assert "the plans are for two meshes; a checkpoint carries a state" in refused


def _all_ranks(mesh: fs.Mesh) -> fs.Plan:
    return fs.make_plan(start(), mesh, [(".*", fs.fsdp("data"))], batch=P(("replica", "data")), units=("one", "two"))


def test_files_hold_what_replicas_agree_on(tmp_path: Path) -> None:
    mesh, folder = meshes(), tmp_path / "model"

    def main() -> Any:
        step, state = begun(CASE, mesh)
        own = attempt(lambda: fs.io.save_hf(state, folder))
        dcp = attempt(lambda: fs.io.save_dcp(state, tmp_path / "dcp", step.opt))
        agreed = fs.averaged(state, "anchor")
        fs.io.save_hf(agreed, folder)
        fs.io.save_dcp(agreed, tmp_path / "dcp")
        held = attempt(lambda: fs.io.save_hf(agreed, folder))
        loaded = fs.io.load_hf(folder, step.plan, step.opt)
        tensors = attempt(lambda: fs.io.to_dtensor(state.params, step.plan))
        streamed: Flat = dict(fs.io.export(state))
        again = flat_of(fs.unshard(fs.io.load_dcp(tmp_path / "dcp", step.plan).params, step.plan))
        texts = [raised.text if raised is not None else "" for raised in (own, dcp, held, tensors)]
        return texts, whole(step, state), flat_of(fs.unshard(loaded.params, step.plan)), streamed, again

    for (own, dcp, held, tensors), (params, anchor), loaded, streamed, again in mesh.run(main):
        assert "save_hf: replicas train apart and hold different values of 6 of 6 tensors" in own
        assert "save_hf(fs.averaged(state, 'anchor'), ...)" in own and "save_dcp: replicas train apart" in dcp
        assert "holds weights already" in held
        assert "this plan is that of one replica" in tensors
        assert same(loaded, anchor) and same(again, anchor) and same(streamed, params)
    files = safetensors.torch.load_file(folder / "model.safetensors")
    assert sorted(files) == sorted(flat_of(start()))


def test_replicas_go_on_on_another_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of two ranks, then four of one, which start from the anchor where they are new; then two of three."""
    folder = str(tmp_path / "run")
    first = meshes()

    def main(mesh: fs.Mesh, begin: int, end: int) -> Any:
        step = step_of(CASE, mesh)
        checkpoints = fs.Checkpointer(folder)
        state = (
            checkpoints.restore(step.plan, step.opt) if begin else fs.init_state(step.plan, step.opt, params=start())
        )
        before = whole(step, state)
        state, _ = steps_of(step, state, begin, end)
        checkpoints.save(state)
        return before, whole(step, state)

    one = first.run(lambda: main(first, 0, 3))
    assert command(["ckpt", "convert", folder, str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "params.one.w: [2, 24, 16], a row for each replica of [24, 16]" in capsys.readouterr().err
    four, six = (fs.virtual_mesh(sizes, ("replica", "data")) for sizes in ((4, 1), (2, 3)))
    two = four.run(lambda: main(four, 3, 6))
    anchor = one[0][1][1]
    for rank, (before, after) in enumerate(two):
        own = one[2 * rank][1][0] if rank < 2 else anchor
        assert same(before[0], own) and same(before[1], anchor) and same(after[1], two[0][1][1])
    three = six.run(lambda: main(six, 6, 7))
    for rank, (before, _) in enumerate(three):
        assert same(before[0], two[rank // 3][1][0]) and same(before[1], two[0][1][1])


def test_what_has_no_meaning_is_refused() -> None:
    mesh = meshes()

    def main() -> Any:
        step, state = begun(CASE, mesh)
        inner = fs.make_train_step(step.loss_fn, step.opt.opt, _all_ranks(mesh))
        raised = [attempt(lambda: inner(state, batch(0, mesh.rank)))]
        raised.append(attempt(lambda: step.plan.replace(rules=[(".*", P())])))
        return [one.text if one is not None else "" for one in raised]

    for other, replaced in mesh.run(main):
        assert "the state was made for another plan" in other
        assert "a plan that make_plan did not make" in replaced
