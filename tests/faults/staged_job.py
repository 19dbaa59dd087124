"""A script for torchrun: a pipeline, with a stage on each rank, that survives its processes. One of them may die."""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard import tree

UNITS, WIDTH, ROWS = 6, 4, 4


def start(mesh: fs.Mesh) -> tuple[Any, Any]:
    """A step and a state, with a stage at each position of the axis of stages."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)]), units=("*",))

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model.apply(params, x) - 1).square().mean()
        return loss

    stages = fs.Stages("stage") if "stage" in mesh.axis_names else None
    plan = fs.make_plan(model, mesh, [(".*", fs.P())], batch=fs.P("data"), stages=stages)
    opt = fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=model.params)
    return fs.make_train_step(loss_fn, opt, plan, accumulate=2, clip_norm=1.0), state


def batch(number: int) -> torch.Tensor:
    """The rows of a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def whole(state: Any) -> dict[str, Any]:
    """All parameters. Collective."""
    return {path: leaf.tolist() for path, leaf in tree.paths(fs.unshard(state.params, state.plan))}


def main(folder: str, steps: int, fault: str) -> None:
    """Train, with a checkpoint after every other step, and say so."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    mesh = fs.make_mesh((-1, 1), ("stage", "data"), timeout=60.0)
    with mesh, fs.Checkpointer(f"{folder}/run", every=2) as checkpoints:
        step, first = start(mesh)
        made: dict[int, float] = {}
        state = None
        for state, metrics in fs.train_loop(step, lambda: first, batch, steps=steps, checkpoints=checkpoints):
            made[state.step] = metrics.loss.item()
            if state.step == 5 and mesh.rank == 1 and not again and fault != "none":
                os.kill(os.getpid(), getattr(signal, fault))
        assert state is not None
        told = {"made": made, "world": mesh.size, "whole": whole(state)}
        Path(folder, f"rank{mesh.rank}.{again}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100.0, exit=True)  # a job that hangs says where
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
