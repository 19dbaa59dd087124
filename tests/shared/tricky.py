"""Programs that are hard on whoever must know which unit autograd is in, in the two forms of ``functions``.

Each is legal PyTorch: what passes through, is not used, is recomputed, is written in place outside of units, or is
decided by values.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import fshard as fs

Tree = Any


def affine(p: Tree, x: Tensor) -> Tensor:
    """An affine map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))


def linear(p: Tree, x: Tensor) -> Tensor:
    """An affine map, whose backward does not need its result."""
    return F.linear(x, p["w"], p["b"])


def carrying(p: Tree, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """One new value, and one handed on as it came."""
    return x + affine(p, x + carried), carried


def maybe(p: Tree, x: Tensor, on: bool) -> Tensor:
    """A unit that may do nothing, and then returns its argument itself."""
    return x + affine(p, x) if on else x


def halves(p: Tree, x: Tensor) -> dict[str, Tensor]:
    """Views: of a result, and of the argument."""
    y = linear(p, x)
    return {"left": y[:, :4], "turned": y.t(), "tail": x[:, 4:]}


def remat(p: Tree, x: Tensor) -> Tensor:
    """A unit that recomputes its inside in the backward."""
    y: Tensor = checkpoint(affine, p, x, use_reentrant=False)
    return y


def inner(p: Tree, x: Tensor) -> Tensor:
    """Gradients and vmap inside of a unit: a step down an energy, and a map over rows."""
    w, b = p["w"], p["b"]

    def energy(row: Tensor) -> Tensor:
        return torch.tanh(w @ row + b).square().sum()

    down = torch.func.vmap(torch.func.grad(energy))(x)
    z = x + 0.0
    if z.requires_grad:
        (slope,) = torch.autograd.grad(torch.tanh(z @ w.t()).sum(), z, create_graph=True)
    else:
        with torch.enable_grad():
            z = z.requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(z @ w.t()).sum(), z, create_graph=True)
    return x - 0.1 * down + 0.1 * slope


class Doubled(torch.autograd.Function):
    """Twice the argument, with a backward of its own that needs what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Save both."""
        ctx.save_for_backward(x, w)
        return 2 * x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The product rule."""
        x, w = ctx.saved_tensors
        return 2 * grads[0] @ w, 2 * grads[0].t() @ x


def custom(p: Tree, x: Tensor) -> Tensor:
    """A hand-written backward inside of a unit."""
    y: Tensor = Doubled.apply(x, p["w"])  # type: ignore[no-untyped-call]
    return torch.tanh(y + p["b"])


def stem(p: Tree, x: Tensor) -> Tensor:
    """From the batch's width to the units' width."""
    return F.linear(x, p["w"])


UNITS = ("stem", "a", "b", "c", "d")


def params() -> dict[str, Tensor]:
    """The leaves of every program here: a stem, four affine units, and a head that no unit reads."""
    whole = {"stem.w": torch.randn(8, 6) / 3}
    for name in "abcd":
        whole[f"{name}.w"] = torch.randn(8, 8) / 3
        whole[f"{name}.b"] = torch.randn(8) / 10
    return {**whole, "head": torch.randn(4, 8) / 3}


def _loss(p: Tree, x: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(F.linear(x, p["head"]), batch["y"])


def passing(p: Tree, batch: Any, units: Any) -> Tensor:
    """A value that passes through units, a unit that only hands on, and one whose result is not new."""
    memory = units.affine(p["a"], units.stem(p["stem"], batch["x"]))
    x, memory = units.carrying(p["b"], memory, memory)
    x = units.maybe(p["d"], x, False)
    x, memory = units.carrying(p["c"], x, memory)
    return _loss(p, x + memory, batch)


def unused(p: Tree, batch: Any, units: Any) -> Tensor:
    """Results that no gradient comes back to: dropped, detached, under no_grad, or half used."""
    x = units.stem(p["stem"], batch["x"])
    units.affine(p["a"], x)
    with torch.no_grad():
        target = units.affine(p["a"], x)
    x = x + units.affine(p["b"], x).detach()
    x, _ = units.carrying(p["c"], x, target)
    _, same = units.carrying(p["d"], x, x)
    return _loss(p, same, batch)


def viewed(p: Tree, batch: Any, units: Any) -> Tensor:
    """Views out of a unit, and writes in place to results of units by the code between them."""
    x = units.linear(p["a"], units.stem(p["stem"], batch["x"]))
    x.mul_(0.5)
    parts = units.halves(p["b"], x)
    parts["left"].add_(1.0)
    x = torch.cat([parts["left"], parts["tail"]], 1) + parts["turned"].t()
    x = units.linear(p["c"], torch.tanh(x))
    x[:, :2] = 0.25
    return _loss(p, units.affine(p["d"], x), batch)


def recomputed(p: Tree, batch: Any, units: Any) -> Tensor:
    """Activation checkpointing inside of a unit and around units."""
    x = units.remat(p["a"], units.stem(p["stem"], batch["x"]))
    for name in "bcd":
        x = x + checkpoint(units.affine, p[name], x, use_reentrant=False)
    return _loss(p, x, batch)


def stretched(p: Tree, batch: Any, units: Any) -> Tensor:
    """Activation checkpointing around a stretch of the program: two units and code between them."""

    def stretch(one: Tree, two: Tree, x: Tensor) -> Tensor:
        result: Tensor = units.affine(two, torch.sin(units.affine(one, x)))
        return result

    x = units.stem(p["stem"], batch["x"])
    x = x + checkpoint(stretch, p["a"], p["b"], x, use_reentrant=False)
    x = x + checkpoint(stretch, p["c"], p["d"], x, use_reentrant=False)
    return _loss(p, x, batch)


def penalised(p: Tree, batch: Any, units: Any) -> Tensor:
    """A gradient penalty: the program differentiates its own units, and that is differentiated again."""
    x = batch["x"].clone().requires_grad_()
    y = units.affine(p["b"], units.affine(p["a"], units.stem(p["stem"], x)))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return _loss(p, units.affine(p["c"], y), batch) + slope.square().mean()


def differentiated(p: Tree, batch: Any, units: Any) -> Tensor:
    """``torch.func``, ``autograd.grad`` and a custom autograd function inside of units."""
    x = units.stem(p["stem"], batch["x"])
    x = units.inner(p["b"], units.custom(p["a"], x))
    return _loss(p, units.custom(p["d"], units.affine(p["c"], x)), batch)


def regularised(p: Tree, batch: Any, units: Any) -> Tensor:
    """Code outside of units that reads the leaves of units, before, between and after them."""
    scale = p["a"]["b"].exp()
    x = units.affine(p["a"], units.stem(p["stem"], batch["x"])) * scale
    x = units.affine(p["d"], x) + F.linear(x, p["d"]["w"].t())
    penalty = sum(p[name]["w"].square().sum() for name in "abd")
    return _loss(p, x, batch) + 0.01 * penalty


def nested(p: Tree, batch: Any, units: Any) -> Tensor:
    """A unit that calls units, and a unit of several subtrees that shares one of them with others."""
    x = units.stem(p["stem"], batch["x"])
    x = units.outer({"one": p["a"], "two": p["b"]}, x)
    x = units.affine(p["a"], x)
    return _loss(p, units.outer({"one": p["c"], "two": p["a"]}, x), batch)


def branching(p: Tree, batch: Any, units: Any) -> Tensor:
    """Values decide which units run, and in which order. All ranks see the same values."""
    x = units.stem(p["stem"], batch["x"])
    order = {0: "abcd", 1: "dcb", 2: "aacd"}[int(batch["turn"])]
    for name in order:
        x = units.affine(p[name], x)
    return _loss(p, x, batch)


def _namespace(mark: Any) -> SimpleNamespace:
    functions = (affine, linear, carrying, maybe, halves, remat, inner, custom, stem)
    units = SimpleNamespace(**{function.__name__: mark(function) for function in functions})

    def outer(p: Tree, x: Tensor) -> Tensor:
        """Two units, one after the other."""
        result: Tensor = units.affine(p["two"], units.affine(p["one"], x))
        return result

    units.outer = mark(outer)
    return units


PLAIN = _namespace(lambda function: function)
MARKED = _namespace(fs.unit)
PROGRAMS = (
    passing,
    unused,
    viewed,
    recomputed,
    stretched,
    differentiated,
    penalised,
    regularised,
    nested,
    branching,
)
