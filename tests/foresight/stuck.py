"""A rank of a run in which rank 1 gets stuck in its loss function at the third step."""

import time
from typing import Any

import torch

import fshard as fs

BEFORE = 2
"""Steps that all ranks make."""


def main() -> None:
    """Train until something ends it."""
    train(30.0, 120.0)


def named() -> str:
    """Train until the other rank's wait has timed out, and return what this one is told."""
    try:
        train(2.0, 5.0)
    except fs.errors.CommError as error:
        return str(error)
    return ""


def train(timeout: float, seconds: float) -> None:
    """Train, with a rank that sleeps for some seconds in the third step."""
    with fs.make_mesh((-1,), ("shard",), timeout=timeout) as mesh:
        calls = [0]

        @fs.unit
        def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
            if mesh.rank == 1 and not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
                calls[0] += 1
                if calls[0] > 2 * BEFORE:
                    print("stuck", flush=True)
                    time.sleep(seconds)
            return torch.tanh(x @ params["w"])

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return layer(params["b"], layer(params["a"], x)).square().mean()

        params = {name: {"w": torch.eye(64)} for name in "ab"}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("*",))
        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(loss, opt, plan)
        state = fs.init_state(plan, opt, params=params)
        for _ in range(10):
            state, _ = step(state, torch.ones(4, 64))
