"""Collectives inside of loss functions: batch statistics over all ranks, against plain PyTorch on the global batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P
from fshard import collectives as c
from tests.shared.virtual import Job

ROWS = 24


def draw() -> tuple[dict[str, Any], Tensor]:
    """Whole parameters and the global batch."""
    torch.manual_seed(4)
    shapes = {"first": (6, 5), "scale": (6,), "last": (3, 6)}
    params = {name: {"w": torch.randn(shape, dtype=torch.float64)} for name, shape in shapes.items()}
    return params, torch.randn(ROWS, 5, dtype=torch.float64)


def normed(p: Any, x: Tensor, mesh: fs.Mesh | None) -> Tensor:
    """Rows over the statistics of all rows of all ranks."""
    moments = torch.stack([x.mean(0), x.square().mean(0)])
    if mesh is not None:
        moments = c.pmean(moments, "shard", mesh=mesh)
    return p["w"] * (x - moments[0]) / (moments[1] - moments[0].square() + 1e-3).sqrt()


def loss_of(mesh: fs.Mesh | None, named: bool) -> Any:
    """The loss; on a mesh with units, of which one talks to the other ranks."""
    where = {} if named else {"mesh": mesh}
    unit = fs.unit if mesh is not None else lambda fn: fn
    first = unit(lambda p, x: torch.tanh(F.linear(x, p["w"])))
    norm = unit(lambda p, x: normed(p, x, mesh))
    last = unit(lambda p, x: F.linear(x, p["w"]))

    def loss(params: Any, x: Tensor) -> Tensor:
        y = last(params["last"], norm(params["scale"], first(params["first"], x)))
        total = y.square().mean()
        mean = c.pmean(total, "shard", **where) if mesh is not None else total
        return y.cos().mean() * mean

    return loss


def on_a_rank(named: bool) -> list[str]:
    """On a rank: the ways to a gradient that do not give that of the global batch."""
    whole, batch = draw()
    want = torch.func.grad(loss_of(None, named))(whole, batch)
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        loss, rules = loss_of(mesh, named), [(r"scale.*", P()), (r".*", fs.fsdp("shard"))]
        plan = fs.make_plan(whole, mesh, rules, batch=P("shard"), units=("first", "scale", "last"))
        local = batch.chunk(mesh.size)[mesh.rank]
        params = fs.shard(whole, plan)
        grads = {
            "sharded_loss": torch.func.grad(fs.func.sharded_loss(loss, plan))(params, local),
            "gathered once": torch.func.grad(fs.func.sharded_loss(loss, plan, reshard=False))(params, local),
            "value_and_grad": fs.value_and_grad(loss, plan)(params, local)[1],
        }
        state = fs.init_state(plan, fs.optim.sgd(1.0), params=whole)
        step = fs.make_train_step(loss, fs.optim.sgd(1.0), plan, debug=True)
        state, metrics = step(state, local)
        after = fs.unshard(state.params, plan)
        for name, leaves in want.items():
            for way, grad in grads.items():
                gap = fs.unshard(grad, plan)[name]["w"] - leaves["w"]
                out += [f"{way}: {name} is off by {gap.abs().max()}"] * (not gap.abs().max() < 1e-9)
            gap = whole[name]["w"] - after[name]["w"] - leaves["w"]
            out += [f"step: {name} is off by {gap.abs().max()}"] * (not gap.abs().max() < 1e-9)
        plain = loss_of(None, named)(whole, batch).item()
        evaluated = fs.make_eval_step(loss, plan)(fs.init_state(plan, fs.optim.sgd(1.0), params=whole), local)
        out += ["loss"] * (not abs(metrics.loss.item() - plain) < 1e-6 or not abs(float(evaluated) - plain) < 1e-6)
    return out


@pytest.mark.sample(3)
@pytest.mark.parametrize("named", [True, False], ids=["in scope", "by mesh="])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_the_global_batch(job: Job, world: int, named: bool) -> None:
    assert fs.virtual_mesh((world,), ("any",)).run(on_a_rank, named) == [[]] * world
    assert job(world).run(on_a_rank, named) == [[]] * world
