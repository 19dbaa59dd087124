"""A script for torchrun on nodes that come and go: it trains until a file says that it is enough."""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard.runtime.comm import exchange
from tests.faults.program import batch, start


def part(number: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """This rank's part of a batch that is the same for one rank and for two."""
    parts = [batch(number, each) for each in ((rank,) if world == 2 else (0, 1))]
    return {name: torch.cat([each[name] for each in parts]) for name in parts[0]}


@fs.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A matrix, and a bias if there is one."""
    return torch.tanh(torch.nn.functional.linear(x, p["w"], p.get("b")))


def loss(params: Any, rows: Any) -> torch.Tensor:
    """Without random numbers, which depend on how a batch is cut."""
    x = rows["x"]
    for name in ("first", "middle", "last"):
        x = layer(params[name], x)
    return (x - rows["y"]).square().mean()


def main(folder: Path) -> None:
    """Train, with a checkpoint after every step, and say so."""
    with (
        fs.make_mesh((-1,), ("shard",), timeout=60.0) as mesh,
        fs.Checkpointer(folder / "run", every=1) as checkpoints,
        open(folder / f"process.{os.getpid()}", "w") as log,
    ):
        plan, opt, _ = start(mesh)
        step = fs.make_train_step(loss, opt, plan)
        comm: Any = None if mesh.size == 1 else mesh.transport.communicator("control", mesh.axis_names)
        batches = lambda number: part(number, mesh.rank, mesh.size)  # noqa: E731
        for state, _ in fs.train_loop(step, lambda: start(mesh)[2], batches, steps=1 << 20, checkpoints=checkpoints):
            row = {"step": state.step, "world": mesh.size, "rank": mesh.rank, "pid": os.getpid(), "time": time.time()}
            print(json.dumps(row), file=log, flush=True)
            enough = torch.tensor([(folder / "enough").exists()])
            if (exchange(comm, enough) if comm else enough).any():
                return
            time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(150.0, exit=True)  # a job that hangs says where
    main(Path(sys.argv[1]))
