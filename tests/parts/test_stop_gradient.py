"""Parameters into which no gradient flows stay sharded, and other calls of their units keep their gradients."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.parts.plain import batch, dis, gen, local, plan_on, whole
from tests.shared.workers import Pools

OPTIONS: list[dict[str, Any]] = [{}, {"remat": "all"}, {"compile": "fx"}, {"schedule": fs.Policy(reshard=False)}]


def once(params: Any, batch: Any) -> Any:
    """The discriminator is called twice, and one of its calls gives it no gradient."""
    stopped = {**params, "dis": fs.stop_gradient(params["dis"])}
    fooled = torch.nn.functional.softplus(dis(stopped, gen(params, batch["x"]))).mean()
    return fooled + dis(params, batch["y"]).tanh().mean() * 0.5


def never(params: Any, batch: Any) -> Any:
    """The discriminator gets no gradient at all; a leaf outside of units is stopped too."""
    stopped = {**params, "dis": fs.stop_gradient(params["dis"]), "scale": fs.stop_gradient(params["scale"])}
    return torch.nn.functional.softplus(dis(stopped, gen(stopped, batch["x"]))).mean()


def check(world: int) -> None:
    """Gradients are those of plain PyTorch, by schedule and under torch.func; units are gathered where they run."""
    plan = plan_on(fs.make_mesh((world,), ("shard",)))
    state, part = fs.init_state(plan, fs.optim.sgd(0.1), params=whole()), local(batch(), plan)
    for loss in (once, never):
        expected = dict(tree.paths(torch.func.grad(lambda params, loss=loss: loss(params, batch()))(whole())))

        def close(grads: Any, expected: dict[str, Any] = expected) -> bool:
            found = dict(tree.paths(fs.unshard(grads, plan)))
            return all(torch.allclose(found[path], leaf, rtol=0, atol=1e-12) for path, leaf in expected.items())

        for options in OPTIONS:
            grad = fs.value_and_grad(loss, plan, **options)
            assert all(close(grad(state, part)[1]) for _ in range(2)), (loss, options)
            assert grad.record == grad.schedule.ops
            assert len(grad.schedule.program.reads["root"]) == 1, "a unit's leaves are gathered for the whole step"
        sharded = fs.func.sharded_loss(loss, plan)
        assert close(torch.func.grad(lambda params, of=sharded: of(params, part))(tree.map(torch.clone, state.params)))


@pytest.mark.long
def test_on_one_rank() -> None:
    check(1)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_on_ranks(pool: Pools, world: int) -> None:
    pool(world).run(check, world)


def test_values_that_are_no_parameters() -> None:
    w = torch.ones(2, requires_grad=True)
    found = fs.stop_gradient({"w": w, "n": 3, "none": None})
    assert not found["w"].requires_grad
    assert found["n"] == 3
    assert found["none"] is None
