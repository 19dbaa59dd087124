"""Parameters that the program of a batch does not read have zero gradients, whatever the batch before has left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.shared.workers import Pools

OPT = fs.optim.sgd(0.1)
SIZES = (2, 2, 3, 3, 2, 3, 4)
"""Rows of batches: with 2 all layers are read, with 3 the first alone, with 4 the second alone."""


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """Its gradient depends on the batch alone."""
    return x * p["w"].sum()


def loss(p: Any, batch: Any) -> Tensor:
    """Layers that depend on the shape of the batch, which each rank has alike."""
    x = batch["x"]
    first = layer(p["a"], x) if x.shape[0] in (2, 3) else x
    return (first + layer(p["b"], x) if x.shape[0] in (2, 4) else first).mean()


def params() -> dict[str, Any]:
    """Two layers, a group each."""
    return {name: {"w": torch.ones(4)} for name in "ab"}


def batch(size: int) -> dict[str, Tensor]:
    """Rows for each of some ranks."""
    return {"x": torch.full((size,), float(size))}


def plain() -> list[list[float]]:
    """The sums of both layers after each step, of plain PyTorch."""
    held, found = params(), []
    leaves = [held[name]["w"].requires_grad_() for name in "ab"]
    for size in SIZES:
        grads = torch.autograd.grad(loss(held, batch(size)), leaves, allow_unused=True)
        with torch.no_grad():
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    leaf -= 0.1 * grad
        found.append([float(leaf.detach().sum()) for leaf in leaves])
    return found


def parts(plan: fs.Plan) -> Callable[[Any, Any], Any]:
    """A step function of parts."""
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)
    return fs.make_step(lambda state, batch: update(state, grad(state, batch)[1]), plan)


def apart(plan: fs.Plan) -> Callable[[Any, Any], Any]:
    """The parts, called one by one."""
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)
    return lambda state, batch: update(state, grad(state, batch)[1])


STEPS: dict[str, Callable[[Any], Callable[[Any, Any], Any]]] = {
    "parts": parts,
    "parts, one by one": apart,
    "train step": lambda plan: fs.make_train_step(loss, OPT, plan),
    "in the backward": lambda plan: fs.make_train_step(loss, OPT, plan, schedule=fs.Policy(update="in_backward")),
    "graphs": lambda plan: fs.make_train_step(loss, OPT, plan, compile="fx"),
}


def trained(name: str, spec: Any) -> list[list[float]]:
    """The sums of both layers after each step, on a rank."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(params(), mesh, [(".*", spec)], units=("*",))
        step, state, found = STEPS[name](plan), fs.init_state(plan, OPT, params=params()), []
        for size in SIZES:
            state, _ = step(state, batch(size))
            found.append([float(x.sum()) for x in tree.leaves(fs.unshard(state.params, plan))])
        return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", [fs.fsdp("shard"), fs.P()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("world", [1, 2])
def test_what_a_batch_does_not_read_stays(pool: Pools, world: int, name: str, spec: Any) -> None:
    for found in pool(world).run(trained, name, spec):
        assert torch.allclose(torch.tensor(found), torch.tensor(plain()), atol=1e-5)
