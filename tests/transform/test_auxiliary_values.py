"""Values beside a sharded loss (``has_aux=True``), and their derivatives, where the loss runs on a schedule."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.shared.bad import attempt
from tests.transform import cases as cases
from tests.transform.cases import Case
from tests.transform.test_scheduled_losses import TWO, F, X
from tests.transform.test_transforms import FLAT, mine


def with_aux(p: Any, x: Any) -> Any:
    """A loss with a mean of all ranks, and tensors of each."""
    out = cases.predict(p, x)
    aux = {"square": fs.Mean(out.square().sum(), out.numel()), "out": out, "scale": p["scale"] * 2, "rows": x["y"] + 1}
    return cases.weighted_loss(p, x), aux


AUX: dict[str, Case] = {
    "beside": lambda f, p, v, x: F.grad_and_value(lambda p: f(p, x), has_aux=True)(p),
    "left out": lambda f, p, v, x: F.grad(lambda p: f(p, x)[0])(p),
    "in the loss": lambda f, p, v, x: F.grad(lambda p: (lambda loss, aux: loss * aux["square"])(*f(p, x)))(p),
    "alone": lambda f, p, v, x: F.grad(lambda p: f(p, x)[1]["square"])(p),
    "of this rank": lambda f, p, v, x: F.grad(lambda p: f(p, x)[1]["out"].sum() * f(p, x)[1]["scale"])(p),
    "by one leaf": lambda f, p, v, x: F.grad(lambda s: (lambda r: r[0] * r[1]["square"])(f({**p, "scale": s}, x)))(
        p["scale"]
    ),
    "of a pullback": lambda f, p, v, x: F.vjp(lambda p: f(p, x), p, has_aux=True)[1](TWO)[0],
    "forward": lambda f, p, v, x: F.jvp(lambda p: (lambda loss, aux: loss * aux["square"])(*f(p, x)), (p,), (v,)),
    "twice": lambda f, p, v, x: F.jvp(lambda p: F.grad(lambda p: f(p, x), has_aux=True)(p), (p,), (v,))[1],
}


def plain_aux(p: Any, x: Any) -> Any:
    """The same on whole tensors, in plain PyTorch."""
    loss, aux = with_aux({**p, "frozen": p["frozen"].detach()}, x)
    return loss.value, {**aux, "square": aux["square"].value}


def auxiliary(reshard: bool) -> list[str]:
    """On a rank: where values beside a loss, or their derivatives, are not those of the path without schedules."""
    out: list[str] = []
    with fs.make_mesh(*FLAT) as mesh:
        plan, x = cases.plan_on(mesh), mine(X, mesh)
        params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        for name, case in AUX.items():
            f = fs.func.sharded_loss(with_aux, plan, has_aux=True, reshard=reshard)
            unscheduled = fs.func.sharded_loss(with_aux, plan, has_aux=True, debug=True)
            found, want = (tree.leaves(case(loss, params, v, x)) for loss in (f, unscheduled))
            out += [name] * any(
                a.shape != b.shape or a.dtype != b.dtype or a.requires_grad or not torch.allclose(a, b, rtol=1e-9)
                for a, b in zip(found, want, strict=True)
            )
            if mesh.size == 1:
                whole = tree.leaves(case(plain_aux, cases.whole(), cases.directions(), X))
                pairs = zip(found, whole, strict=True)
                out += [f"{name}: plain"] * (not all(torch.allclose(a.flatten(), b.flatten()) for a, b in pairs))
            told = attempt(lambda f=f: f.schedule)
            out += [f"{name}: {told}"] * ((told is None) == (name in ("forward", "twice")))
    return out


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_values_beside_a_loss_have_derivatives_too(ranks: int) -> None:
    assert not sum(fs.virtual_mesh((ranks,), ("any",)).run(auxiliary, ranks == 2), [])


def test_values_beside_a_loss_are_asked_for() -> None:
    plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])

    def loss(p: Any, x: Tensor) -> Any:
        return (p["w"] * x).sum(), {"seen": x.sum()}

    with pytest.raises(fs.errors.LossError, match="has_aux=True"):
        F.grad(fs.func.sharded_loss(loss, plan))({"w": torch.ones(3)}, torch.ones(3))
