"""A script for torchrun: replicas that train apart in a loop that survives them. One of them may be told to end."""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import torch

import fshard as fs
from tests.outer_steps.cases import Case, start, step_of, whole
from tests.training.wire_cases import batch

CASE = Case(every=2, wire="int8", fragments=2, delay=1)
"""A fragment leaves after every step, so that replicas notice each other soon."""

if __name__ == "__main__":
    folder, steps, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100.0, exit=True)  # a job that hangs says where
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with (
        fs.make_mesh((-1, 1), ("replica", "data"), timeout=60.0) as mesh,
        fs.Checkpointer(f"{folder}/run", every=2) as checkpoints,
    ):
        step, made = step_of(CASE, mesh), []
        state = fs.init_state(step.plan, step.opt, params=start())
        if checkpoints.latest() is not None:
            state = checkpoints.restore(step.plan, step.opt)
        begun = [{path: leaf.tolist() for path, leaf in one.items()} for one in whole(step, state)]
        loop = fs.train_loop(step, lambda: state, lambda n: batch(n, mesh.rank), steps=steps, checkpoints=checkpoints)
        for state, _ in loop:
            made.append(state.step)
            if state.step == 5 and mesh.rank == 1 and again == "0" and fault != "none":
                os.kill(os.getpid(), getattr(signal, fault))
        ended = [{path: leaf.tolist() for path, leaf in one.items()} for one in whole(step, state)]
        found = {"made": made, "begun": begun, "ended": ended}
        Path(folder, f"rank{mesh.rank}.{again}.json").write_text(json.dumps(found))
