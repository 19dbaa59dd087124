"""What tests of graphs share: an example of the zoo with graphs or without, and steps of hand-written units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from tests.shared import parity, zoo

STEPS = 3
RARE = frozenset(("branching",))
"""Programs that leave their schedule, in which the order of calls changes."""


def train(name: str, compile: str | None, mesh: fs.Mesh, **options: Any) -> tuple[parity.Run, fs.types.TrainStep]:
    """Some steps of an example of the zoo, and the step."""
    example = zoo.build(name)
    plan = example.plan(mesh)
    opt = fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=example.params())
    step = fs.make_train_step(example.loss_fn, opt, plan, compile=compile, clip_norm=example.clip, **options)
    first = None if name in RARE else 0
    run, _ = parity.sharded(step, state, plan, example.batches(mesh, STEPS), scheduled_from=first)
    return run, step


def step_of(units: Callable[..., Tensor], params: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A step of hand-written units, and its state."""
    mesh = fs.make_mesh((1,), ("shard",))
    owners = [path.rpartition(".")[0] for path, _ in tree.paths(params)]
    plan = fs.make_plan(
        params, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"), units=tuple(dict.fromkeys(owners))
    )
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=tree.map(torch.clone, params))
    return fs.make_train_step(units, opt, plan, **options), state


def trained(
    loss: Callable[..., Any], params: dict[str, Any], batches: list[Any], compile: str | None
) -> tuple[fs.types.TrainStep, list[float], list[Tensor]]:
    """A step that has seen these batches, the losses, and the parameters after them."""
    step, state = step_of(loss, params, compile=compile)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    return step, losses, tree.leaves(state.params)


def params_of(*names: str) -> dict[str, Any]:
    """A weight and a bias under each name."""
    generator = torch.Generator().manual_seed(3)
    return {name: {"w": torch.randn(6, 6, generator=generator), "b": torch.zeros(6)} for name in names}


def rows(number: int, count: int = 8) -> Tensor:
    """A batch."""
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(number))


def affine(p: Any, x: Tensor) -> Tensor:
    """An affine map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))
