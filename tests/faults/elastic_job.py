"""A script for torchrun: ten lines of training that survive their processes. Here one of them is told to fail."""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import torch

import fshard as fs
from fshard import tree
from tests.faults.program import Fault, batch, make_loss, start

if __name__ == "__main__":
    folder, steps, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100.0, exit=True)  # a job that hangs says where
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with (
        fs.make_mesh((-1,), ("shard",), timeout=60.0) as mesh,
        fs.Checkpointer(f"{folder}/run", every=2) as checkpoints,
    ):
        plan, opt, _ = start(mesh)
        step = fs.make_train_step(make_loss(Fault()), opt, plan)
        begin, batches = lambda: start(mesh)[2], lambda number: batch(number, mesh.rank)
        made: dict[int, float] = {}
        report = Path(folder, f"rank{mesh.rank}.{again}.json")
        state = None
        for state, metrics in fs.train_loop(step, begin, batches, steps=steps, checkpoints=checkpoints):
            made[state.step] = metrics.loss.item()
            report.write_text(json.dumps({"made": made, "world": mesh.size}))
            if state.step == 5 and mesh.rank == 1 and not again:
                if fault == "raises":
                    raise ValueError("a fault of its own")
                if fault != "none":
                    os.kill(os.getpid(), getattr(signal, fault))
        assert state is not None
        whole = {path: leaf.tolist() for path, leaf in tree.paths(fs.unshard(state.params, plan))}
        report.write_text(json.dumps({"made": made, "world": mesh.size, "whole": whole}))
