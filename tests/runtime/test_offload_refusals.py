"""Activations that cannot wait on the host: errors before anything is sent."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from tests.runtime.test_offloaded_activations import mixed, mixture, mixture_params


def refused(remat: Any, loss_fn: Any = mixture, error: Any = PlanError, **options: Any) -> str:
    """The error of a step, whose ranks have exchanged nothing."""
    mesh, params = fs.virtual_mesh((2,), ("shard",)), mixture_params(torch.float32)
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
    with pytest.raises(error) as caught:
        fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, remat=remat, **options).trace(torch.ones(4, 6, 8))
    return str(caught.value)


def test_bad_input_is_refused() -> None:
    for ahead in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match=rf"offload\(prefetch={ahead}\): .* give an int of at least 1"):
            fs.checkpoint_policies.offload(prefetch=ahead)  # type: ignore[arg-type]
    assert "match no unit" in (words := refused([("blocks", "offload")])) and "'blocks'" in words
    words = refused([("0.w", "offload")])
    assert "names 0.w, a parameter" in words and "donates" in words and "memory_kind='pinned_host'" in words
    with pytest.raises(PlanError, match="only the schedule of a step"):
        fs.remat(torch.sin, fs.checkpoint_policies.offload())


def test_a_unit_that_the_loss_differentiates_is_refused() -> None:
    def penalty(p: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = mixed({"w": p["0"]["w"], "b": p["tied"]}, mixed({"w": p["1"]["w"], "b": p["tied"]}, x, x), x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mixture(p, x) + grad.square().mean()

    words = refused("offload", penalty)
    assert "differentiates mixed(tied,0.w), mixed(tied,1.w) itself" in words and "None), ...]" in words


def test_what_is_written_after_it_was_saved_is_an_error() -> None:
    """As without: autograd says so where it finds it."""

    @fs.unit
    def broken(p: Any, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, p["w"]))
        z = y * 2
        with torch.no_grad():
            y.detach().mul_(2)
        return z

    def loss(p: Any, x: Tensor) -> Tensor:
        for name in ("0", "1", "2"):
            x = broken(p[name], x)
        return x.square().mean()

    mesh = fs.make_mesh((1,), ("shard",))
    params = {name: {"w": torch.eye(4)} for name in "012"}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
    for remat in (None, "offload"):
        step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan, remat=remat)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step.trace(torch.ones(2, 4))


def test_a_pipeline_refuses_it() -> None:
    mesh, params = fs.virtual_mesh((2,), ("stage",)), mixture_params(torch.float32)
    units = ("0", "1", "2", "3")
    rules = [(".*", P())]
    plan = fs.make_plan(params, mesh, rules, batch=P(), units=units, stages=fs.Stages("stage"))
    step = fs.make_train_step(mixture, fs.optim.sgd(0.1), plan, remat="offload")
    with pytest.raises(PlanError, match="stages: remat='offload' .* give remat='all'"):
        step.trace(torch.ones(4, 6, 8))


def test_a_step_that_would_move_nothing_is_refused() -> None:
    words = refused("offload", lambda params, x: (params["0"]["w"].sum() * x).mean())
    assert "nothing would leave" in words and "has 0 calls of units" in words and "fs.split(units=)" in words
    words = refused(fs.checkpoint_policies.offload(prefetch=5))
    assert "nothing would leave" in words and "has 5 calls of units, and with prefetch=5" in words
    assert "prefetch=9" in refused([("**", fs.checkpoint_policies.offload(prefetch=9))])
