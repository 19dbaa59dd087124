"""Trees of the leaves that are trained, such as those of the optimizer's state, as whole tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs

SHAPES = {"a": {"w": (5, 3), "b": (5,)}, "c": {"w": (3, 4)}}


def start() -> dict[str, Any]:
    """Parameters."""
    draw = torch.Generator().manual_seed(0)
    return {u: {n: torch.randn(s, generator=draw) for n, s in leaves.items()} for u, leaves in SHAPES.items()}


def loss(params: Any, x: Tensor) -> Tensor:
    """Of all of them."""
    y = torch.tanh(x @ params["a"]["w"].t() + params["a"]["b"])
    return (y.sum() * params["c"]["w"].square().sum()).square()


def trained(spec: fs.P, everywhere: bool) -> Any:
    """Whole moments of a step that trains one unit, or what they are where all leaves are trained."""
    mesh = fs.virtual_mesh((2,), ("data",))

    def on_ranks() -> Any:
        here = mesh if everywhere else fs.make_mesh((-1,), ("data",))
        plan = fs.make_plan(start(), here, [fs.Rule("c.*", spec, trainable=False), (".*", spec)], batch=fs.P("data"))
        opt = fs.optim.adamw(0.1)
        state = fs.init_state(plan, opt, params=start())
        x = torch.arange(12.0).view(4, 3) / 12
        state, _ = fs.make_train_step(loss, opt, plan)(state, plan.local_batch(x))
        return fs.unshard(state.opt_state["exp_avg"], plan), fs.unshard(state.params, plan)

    return on_ranks() if everywhere else mesh.run(on_ranks)[1]


@pytest.mark.parametrize("everywhere", [False, True], ids=["ranks", "outside of run"])
@pytest.mark.parametrize("spec", [fs.fsdp("data"), fs.P()], ids=["sharded", "replicated"])
def test_moments_of_a_partly_frozen_model_are_whole(spec: fs.P, everywhere: bool) -> None:
    moments, params = trained(spec, everywhere)
    twin = start()
    leaves = [twin["a"]["w"].requires_grad_(), twin["a"]["b"].requires_grad_()]
    x = torch.arange(12.0).view(4, 3) / 12
    mean = (loss(twin, x[:2]) + loss(twin, x[2:])) / 2
    grads = torch.autograd.grad(mean, leaves)
    assert moments.keys() == {"a"} and params.keys() == {"a", "c"}
    torch.testing.assert_close(moments["a"]["w"], 0.1 * grads[0])
    torch.testing.assert_close(moments["a"]["b"], 0.1 * grads[1])


@pytest.mark.parametrize("left", [["a.w"], ["a.w", "c.w"], []])
def test_other_parts_of_a_tree_are_refused(left: list[str]) -> None:
    mesh = fs.make_mesh((1,), ("data",))
    plan = fs.make_plan(start(), mesh, [fs.Rule("c.*", fs.P(), trainable=False), (".*", fs.P())])
    flat = {path: leaf for path, leaf in fs.tree.paths(start()) if path in left}
    with pytest.raises(fs.errors.TreeError, match=r"missing  a\.b"):
        fs.unshard(fs.tree.nest(flat), plan)
