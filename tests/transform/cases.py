"""One model with every kind of leaf, and everything that is done to its loss, sharded and plain."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree

Loss = Callable[[Any, Any], Tensor]
F = torch.func
ROWS, WIDTH = 12, 12

RULES = [
    (r"layers\.\d\.norm", P()),  # replicated, inside of a unit
    (r"layers\.1\.out", P("shard")),  # cut along a dim
    (r"layers\.1\.inp\.weight", P(None, "shard")),
    (r"scale", P()),
    (r".*", fs.fsdp("shard")),  # ranges of a flat buffer, of uneven sizes
]


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A residual perceptron with a gain."""
    return x + torch.tanh(x @ p["inp"]["weight"].T + p["inp"]["bias"]) @ p["out"].T * p["norm"]


def predict(params: Any, batch: Any) -> Tensor:
    """Logits; the table is read at both ends, and ``frozen`` gets no gradient."""
    x = params["table"][batch["x"]] + params["frozen"]
    for i in range(2):
        x = layer(params["layers"][str(i)], x)
    return x @ params["table"].T * params["scale"]


def mean_loss(params: Any, batch: Any) -> Any:
    """A plain mean, right for equal batches."""
    return torch.nn.functional.cross_entropy(predict(params, batch), batch["y"])


def weighted_loss(params: Any, batch: Any) -> Any:
    """An exact mean over the rows that count, whose number differs between ranks."""
    losses = torch.nn.functional.cross_entropy(predict(params, batch), batch["y"], reduction="none")
    return fs.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def _whole() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / 3

    leaves = {"table": normal(7, WIDTH), "frozen": normal(WIDTH), "scale": normal().abs() + 1}
    for i in range(2):
        leaves[f"layers.{i}.inp.weight"], leaves[f"layers.{i}.inp.bias"] = normal(5, WIDTH), normal(5)
        leaves[f"layers.{i}.out"], leaves[f"layers.{i}.norm"] = normal(WIDTH, 5), normal(WIDTH) + 1
    return tree.nest(leaves)


WHOLE = _whole()


def whole() -> dict[str, Any]:
    """The parameters, whole: a tree of its own."""
    copy: dict[str, Any] = tree.map(torch.clone, WHOLE)
    return copy


def batch(seed: int = 0) -> dict[str, Tensor]:
    """The global batch."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(7, (2, ROWS), generator=draw)
    return {"x": x, "y": y, "w": torch.arange(ROWS).remainder(5).double()}


def directions() -> dict[str, Any]:
    """A direction in parameter space; nothing along the frozen leaf, which has no gradient."""
    draw = torch.Generator().manual_seed(9)
    flat = {k: torch.randn(v.shape, generator=draw, dtype=torch.float64) for k, v in tree.paths(whole())}
    flat["frozen"].zero_()
    return tree.nest(flat)


def plan_on(mesh: fs.Mesh) -> fs.Plan:
    """The plan of the model."""
    model = SimpleNamespace(params=whole(), units=("layers.0", "layers.1"), frozen=frozenset({"frozen"}))
    return fs.make_plan(model, mesh, RULES, batch=P("shard") if len(mesh.axis_names) == 1 else P(("replica", "shard")))


def reference(loss_fn: Any) -> Loss:
    """The same on whole tensors and the global batch, in plain PyTorch."""

    def loss(params: Any, batch: Any) -> Tensor:
        found = loss_fn({**params, "frozen": params["frozen"].detach()}, batch)
        return found.value if isinstance(found, fs.Mean) else found

    return loss


def scaled(a: Any, by: float, b: Any) -> Any:
    """``a + by * b``, leaf by leaf."""
    return tree.map(lambda x, y: x + by * y, a, b)


def three_steps(f: Loss, p: Any, v: Any, x: Any) -> Any:
    """The gradient through three steps of gradient descent."""

    def adapted(p: Any) -> Tensor:
        for _ in range(3):
            p = scaled(p, -0.1, F.grad(f)(p, x))
        return f(p, x)

    return F.grad(adapted)(p)


def double_backward(f: Loss, p: Any, v: Any, x: Any) -> Any:
    """The gradient of a gradient's inner product with a direction, by ``torch.autograd``."""
    p = tree.map(lambda leaf: leaf.clone().requires_grad_(), p)
    kept = [leaf for path, leaf in tree.paths(p) if path != "frozen"]
    along = [leaf for path, leaf in tree.paths(v) if path != "frozen"]
    grads = torch.autograd.grad(f(p, x), kept, create_graph=True)
    found = iter(torch.autograd.grad(grads, kept, along))
    return tree.nest(
        {path: torch.zeros_like(leaf) if path == "frozen" else next(found) for path, leaf in tree.paths(p)}
    )


def stacked(p: Any) -> Any:
    """Three members of an ensemble."""
    return tree.map(lambda leaf: torch.stack([leaf, 0.5 * leaf, 2 * leaf]), p)


def add(trees: Any) -> Any:
    """The sum over a first dim of each leaf."""
    return tree.map(lambda leaf: leaf.sum(0), trees)


Case = Callable[[Loss, Any, Any, Any], Any]
CASES: dict[str, Case] = {
    "value": lambda f, p, v, x: f(p, x),
    "grad": lambda f, p, v, x: F.grad(f)(p, x),
    "grad and value": lambda f, p, v, x: F.grad_and_value(f)(p, x),
    "vjp": lambda f, p, v, x: F.vjp(lambda p: f(p, x), p)[1](torch.tensor(2.0).double())[0],
    "jvp": lambda f, p, v, x: F.jvp(lambda p: f(p, x), (p,), (v,)),
    "forward over reverse": lambda f, p, v, x: F.jvp(lambda p: F.grad(f)(p, x), (p,), (v,))[1],
    "reverse over forward": lambda f, p, v, x: F.grad(lambda p: F.jvp(lambda p: f(p, x), (p,), (v,))[1])(p),
    "reverse over reverse": lambda f, p, v, x: F.vjp(lambda p: F.grad(f)(p, x), p)[1](v)[0],
    "jacrev": lambda f, p, v, x: F.jacrev(f)(p, x),
    "vmap over an ensemble": lambda f, p, v, x: torch.vmap(f, (0, None))(stacked(p), x),
    "vmap of grad over an ensemble": lambda f, p, v, x: add(torch.vmap(F.grad(f), (0, None))(stacked(p), x)),
    "vmap over directions": lambda f, p, v, x: torch.vmap(lambda v: F.jvp(lambda p: f(p, x), (p,), (v,))[1])(
        stacked(v)
    ),
    "grad of vmap": lambda f, p, v, x: F.grad(lambda p: torch.vmap(f, (0, None))(stacked(p), x).square().sum())(p),
    "through three steps": three_steps,
    "double backward": double_backward,
}


def of_part(f: Loss, x: Any) -> Callable[[Any], Tensor]:
    """The loss as a function of a few whole leaves."""

    def loss(part: Any) -> Tensor:
        params = whole()
        params["layers"]["1"].update(part)
        params["layers"]["0"]["inp"] |= {"bias": part["norm"][:5] * part["out"][:5, 0]}
        return f(params, x)

    return loss


PART = {"norm": torch.linspace(0.5, 1.5, WIDTH).double(), "out": whole()["layers"]["1"]["out"]}
ON_WHOLE: dict[str, Callable[[Callable[[Any], Tensor]], Any]] = {
    "hessian": lambda f: F.hessian(f)(PART),
    "jacfwd": lambda f: F.jacfwd(f)(PART),
    "jacrev": lambda f: F.jacrev(F.grad(f))(PART),
    "vmap of jvp": lambda f: torch.vmap(lambda s: F.jvp(f, (PART,), (tree.map(lambda x: s * x, PART),))[1])(
        torch.arange(3).double()
    ),
}
