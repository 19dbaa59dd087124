"""What a plan keeps in host memory is no device memory, and what visits the device for an update is."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.foresight.foresee import foresee

HOST = "pinned_host"
LAYERS, WIDTH, RANKS = 3, 64, 4
SHARDS = LAYERS * WIDTH * WIDTH // RANKS * 4
"""Bytes of all parameter shards of a rank."""

KINDS: dict[str, tuple[dict[str, Any], int, int]] = {  # a rule, shards on the device, and in host memory
    "device": ({}, 3, 0),
    "all": ({"memory_kind": HOST}, 0, 4),  # gradients, too
    "all, updated on the device": ({"memory_kind": HOST, "update_on": "device"}, 0, 3),
    "optimizer state": ({"opt_memory_kind": HOST}, 1, 2),
    "optimizer state, updated there": ({"opt_memory_kind": HOST, "update_on": "host"}, 1, 3),
}


def step_of(**rule: Any) -> tuple[Any, torch.Tensor]:
    """A step on an abstract mesh, and a batch."""
    params = {f"l{i}": {"w": torch.empty(WIDTH, WIDTH, device="meta")} for i in range(LAYERS)}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in params.values():
            x = torch.tanh(x @ layer["w"])
        return x.square().mean()

    rules = [fs.Rule(".*", fs.fsdp("data"), **rule)]
    plan = fs.make_plan(params, fs.abstract_mesh((RANKS,), ("data",), device="cuda"), rules, units=("*",))
    return fs.make_train_step(loss, fs.optim.adamw(1e-3), plan), torch.empty(8, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_where_the_plan_keeps_it(kind: str) -> None:
    rule, device, host = KINDS[kind]
    step, batch = step_of(**rule)
    seen = foresee(step, batch, fs.sim.hardware("h100", communicator=1))
    assert (seen.state_bytes / SHARDS, seen.host_bytes / SHARDS) == (device, host)


@pytest.mark.parametrize("kind", KINDS)
def test_foresight_knows_the_groups_of_the_step(kind: str) -> None:
    step, batch = step_of(**KINDS[kind][0])
    trace, seen = step.trace(batch), foresee(step, batch, fs.sim.hardware("h100", communicator=1))
    assert seen.task.groups == trace.schedule.groups
    same = next(each for each in seen.candidates if each.policy == trace.schedule.policy)
    assert same.memory == trace.footprint
