"""Steps that are small enough to look at each op."""

from typing import Any

import torch

import fshard as fs


def trained(mesh: fs.Mesh, steps: int) -> Any:
    """A step on one rank, after some runs."""
    params = {f"l{i}": torch.eye(4) for i in range(2)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda p, x: (x @ p["l0"] @ p["l1"]).sum(), opt, plan)
    state = fs.init_state(plan, opt, params=params)
    for _ in range(steps):
        state, _ = step(state, torch.ones(2, 4))
    return step
