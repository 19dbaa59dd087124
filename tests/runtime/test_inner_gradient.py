"""A loss that takes a gradient of its own through units: they stay gathered, and double backward is right."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from tests.runtime.test_on_demand import SGD, batch_of, layer, setup, start
from tests.shared.bad import Raised, attempt
from tests.shared.workers import Pools
from tests.shared.zoo import cut


def penalty(p: Any, b: Any) -> Tensor:
    """A loss with the norm of the gradient at its input."""
    x = b["x"].clone().requires_grad_()
    y = layer(p["two"], layer(p["one"], x))
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return F.mse_loss(layer(p["three"], y), b["y"]) + 0.1 * slope.square().mean()


def penalized() -> tuple[Raised | None, list[float], dict[str, Tensor]]:
    """On a rank: some steps, or what the first of them raised and whether the state can be used."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, rule, state = setup(mesh)
        step = fs.make_train_step(penalty, rule, plan, debug=True)
        losses: list[float] = []

        def go() -> None:
            nonlocal state
            for number in range(3):
                state, metrics = step(state, cut(batch_of(number), mesh.rank, mesh.size))
                losses.append(metrics.loss.item())

        raised = attempt(go)
        return raised, losses, dict(tree.paths(fs.unshard(state.params, plan)))


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_inside_of_the_loss(pool: Pools, world: int) -> None:
    own = {path: leaf.clone().requires_grad_() for path, leaf in tree.paths(start())}
    rule = torch.optim.SGD(own.values(), **SGD)
    losses = []
    for number in range(3):
        for leaf in own.values():
            leaf.grad = torch.zeros_like(leaf)
        loss = sum(penalty(tree.nest(own), cut(batch_of(number), rank, world)) for rank in range(world)) / world
        loss.backward()
        rule.step()
        losses.append(loss.item())
    for raised, got, params in pool(world).run(penalized):
        assert raised is None, raised
        assert got == pytest.approx(losses, abs=1e-5)
        for path, leaf in own.items():
            torch.testing.assert_close(params[path], leaf.detach(), rtol=0, atol=1e-5)
