"""A run of many steps, as a user would start it with torchrun on several hosts: ``two_hosts.py FOLDER STEPS PAUSE``."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs


def main() -> None:
    """Train to the last step, or go on from the newest checkpoint of the folder."""
    folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with fs.make_mesh((-1,), ("data",), timeout=20.0) as mesh:
        model = fs.split(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), units=("0", "2"))
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        opt = fs.optim.adamw(1e-2)

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            loss: Tensor = (model.apply(params, x) - x.sum(1, True)).square().mean()
            return loss

        def batch(step: int) -> Tensor:
            time.sleep(pause)
            rows: Tensor = plan.local_batch(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
            return rows

        step = fs.make_train_step(loss_fn, opt, plan)
        saves, loss = fs.Checkpointer(folder / "checkpoints", every=2), None
        start = lambda: fs.init_state(plan, opt, seed=0)  # noqa: E731
        for state, metrics in fs.train_loop(step, start, batch, steps=steps, checkpoints=saves):
            loss = metrics.loss.item()
            if mesh.rank == 0:
                (folder / "step").write_text(str(state.step))
        if mesh.rank == 0:
            (folder / "loss").write_text(repr(loss))


if __name__ == "__main__":
    main()
