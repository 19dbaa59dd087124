"""A state that goes to other stages, or to none, and back keeps every bit, and trains as one plain process."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import TreeError
from tests.pipeline.programs import PROGRAMS
from tests.pipeline.staged_runs import CLIP, StagedRun, made, plain
from tests.shared import parity

RUN = StagedRun(sizes=(2, 2))


def cut(chunks: int) -> fs.Stages:
    """Stages of the program, so many on each rank."""
    return fs.Stages("stage", chunks=chunks, leaves=PROGRAMS[RUN.program]().leaves(2 * chunks))


def leaves(state: Any) -> list[torch.Tensor]:
    """The shards of a state."""
    return [leaf for tree in (state.params, state.opt_state) for leaf in fs.tree.leaves(tree)]


def on_rank(mesh: fs.Mesh) -> tuple[bool, parity.Run]:
    """On a rank: a step with two stages, one without, one with four; and whether a way there and back kept the bits."""
    step, plan, state, batch = made(RUN, mesh)
    losses, norms = [], []
    flat, kept = plan.replace(stages=None), True
    for number, target in enumerate([plan, flat, plan.replace(stages=cut(2))]):
        state = fs.reshard_state(state, target, step.opt)
        there = fs.reshard_state(fs.reshard_state(state, plan, step.opt), target, step.opt)
        kept = kept and all(map(torch.equal, leaves(state), leaves(there)))
        now = fs.make_train_step(step.loss_fn, step.opt, target, accumulate=4, clip_norm=CLIP)
        state, metrics = now(state, batch(number))
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    params = dict(fs.tree.paths(fs.unshard(state.params, target)))
    return kept, parity.Run(losses, norms, params)


def test_a_state_moves_between_stages() -> None:
    """Also within a run: parameters and moments."""
    mesh = fs.virtual_mesh(RUN.sizes, RUN.axes)
    found = mesh.run(lambda: on_rank(mesh))
    assert all(kept for kept, _ in found)
    near = parity.Near(1e-5, 1e-5, 2e-5)
    assert parity.differences([run for _, run in found], plain(RUN.program), near) == []


def test_parameters_alone_and_another_optimizer() -> None:
    """Without an optimizer parameters go alone; another one than that of the state is refused on all ranks."""
    mesh = fs.virtual_mesh(RUN.sizes, RUN.axes)

    def run() -> Any:
        _, plan, state, _ = made(RUN, mesh)
        flat = plan.replace(stages=None)
        alone = fs.reshard_state(state, flat, None)
        whole = [fs.unshard(each.params, at) for each, at in ((state, plan), (alone, flat))]
        same = all(map(torch.equal, *map(fs.tree.leaves, whole)))
        with pytest.raises(TreeError, match="only the state has it"):
            fs.reshard_state(state, flat, fs.optim.sgd(0.1))
        return same and not fs.tree.leaves(alone.opt_state)

    assert mesh.run(run) == [True] * 4
