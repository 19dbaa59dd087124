"""Costs of real steps, and choices by them: a step is foreseen from its own ops, and ``auto`` settles soon."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.schedule.auto import Rates

LAYERS = 3


@fs.unit
def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
    """One layer."""
    return torch.tanh(x @ params["w"])


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean of squares."""
    for i in range(LAYERS):
        x = layer(params[f"l{i}"], x)
    return x.square().mean()


def made(mesh: fs.Mesh, schedule: Any = None) -> tuple[Any, Any]:
    """A state and its step."""
    params = {f"l{i}": {"w": torch.eye(16) + i / 10} for i in range(LAYERS)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("*",))
    opt = fs.optim.sgd(0.1)
    return fs.init_state(plan, opt, params=params), fs.make_train_step(loss, opt, plan, schedule=schedule)


def batches(count: int) -> list[torch.Tensor]:
    """So many batches."""
    return [torch.randn(2, 16, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def test_a_step_is_foreseen_from_what_its_ops_took() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def on_a_rank() -> Any:
        state, step = made(mesh)
        runs = []
        for batch in batches(5):
            state, _ = step(state, batch)
            runs.append(step.measured)
        costs = fs.sim.Costs.of(*runs[2:])
        run = fs.sim.simulate(step.schedule, costs)
        waits = {"handshake", "consensus", *[op.kind for op in step.schedule if op.kind.startswith("wait")]}
        assert run.exposed == 0.0 and not waits & {kind for kind, _ in costs.seconds}
        return {target for kind, target in costs.seconds if kind == "forward"}, run.seconds, runs[-1].clock

    (units, seconds, clock), _ = mesh.run(on_a_rank)
    assert units >= {f"layer(l{i}.w)" for i in range(LAYERS)} and seconds > 0 and clock == "cpu"


@pytest.mark.long
def test_auto_begins_with_the_default_times_whole_steps_and_settles_within_40() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    every = batches(44)

    def trained(schedule: Any, steps: int) -> Any:
        state, step = made(mesh, schedule)
        losses, policies, settled = [], [], []
        for batch in every[:steps]:
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
            assert step.record == step.schedule.ops
            policies.append(step.schedule.policy)
            choice = step.trace(batch).choice
            settled.append(choice is not None and choice.settled)
        return losses, policies, choice, settled

    (losses, policies, choice, settled), (other, same, words, _) = mesh.run(lambda: trained("auto", len(every)))
    assert losses == other == mesh.run(lambda: trained(None, len(every)))[0][0]
    assert policies == same and str(choice) == str(words)
    assert policies[0] == fs.Policy() and set(policies[40:]) == {choice.policy}
    assert not any(settled[:5]) and settled[39:] == [True] * 5 and set(policies) == {*choice.measured}
    assert "that were timed in turns" in str(choice)
    given = mesh.run(lambda: trained(fs.Auto(compute=1e9, wire=1e9), 3))[0]
    assert len(set(given[1])) == 1 and isinstance(given[2].rates, Rates) and all(given[3])
