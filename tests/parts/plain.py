"""Step functions over parts, and the same parts in plain PyTorch on whole tensors and the global batch."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree

WIDTH, ROWS = 12, 24

RULES = [
    (r".*norm", P()),  # replicated, inside of a unit
    (r"gen\.1\.out", P("shard")),  # cut along a dim
    (r"scale", P()),
    (r".*", fs.fsdp("shard")),
]


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A residual perceptron with a gain."""
    return x + torch.tanh(x @ p["inp"].T + p["bias"]) @ p["out"].T * p["norm"]


def gen(params: Any, x: Tensor) -> Tensor:
    """Two layers."""
    for i in range(2):
        x = layer(params["gen"][str(i)], x)
    return x * params["scale"]


def dis(params: Any, x: Tensor) -> Tensor:
    """One layer and a sum."""
    return layer(params["dis"]["0"], x).sum(-1)


def first(params: Any, batch: Any) -> Any:
    """A plain mean."""
    return (gen(params, batch["x"]) - batch["y"]).square().mean()


def second(params: Any, batch: Any) -> Any:
    """Another one, of all parameters."""
    return torch.nn.functional.softplus(dis(params, gen(params, batch["x"]))).mean()


def weighted(params: Any, batch: Any) -> Any:
    """An exact mean over counts that differ between ranks, with auxiliary values."""
    losses = (gen(params, batch["x"]) - batch["y"]).square().sum(-1)
    kept = fs.Mean((losses.abs() * batch["w"]).sum(), batch["w"].sum())
    return fs.Mean((losses * batch["w"]).sum(), batch["w"].sum()), {"kept": kept}


def real(params: Any, batch: Any) -> Any:
    """The discriminator's loss."""
    fake = gen(params, batch["x"]).detach()
    return torch.nn.functional.softplus(dis(params, fake)).mean() + dis(params, batch["y"]).tanh().mean()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "first": first, "second": second, "weighted": weighted, "real": real
}  # fmt: skip


def whole(seed: int = 0) -> dict[str, Any]:
    """Parameters."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / 3

    flat = {"scale": normal().abs() + 1}
    for name in ("gen.0", "gen.1", "dis.0"):
        flat |= {f"{name}.inp": normal(5, WIDTH), f"{name}.bias": normal(5)}
        flat |= {f"{name}.out": normal(WIDTH, 5), f"{name}.norm": normal(WIDTH) + 1}
    return tree.nest(flat)


def batch(seed: int = 0) -> dict[str, Tensor]:
    """The global batch."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    return {"x": x, "y": y, "w": torch.arange(ROWS).remainder(5).double()}


def plan_on(mesh: fs.Mesh) -> fs.Plan:
    """The plan."""
    model = SimpleNamespace(params=whole(), units=("gen.0", "gen.1", "dis.0"), frozen=frozenset())
    return fs.make_plan(model, mesh, RULES, batch=P("shard") if len(mesh.axis_names) == 1 else P(("replica", "shard")))


def local(given: Any, plan: fs.Plan) -> Any:
    """This rank's part of a global batch."""
    mesh = plan.mesh
    part = mesh.index(plan.data_axes)
    return tree.map(lambda x: x.chunk(plan.data_size)[part] if isinstance(x, Tensor) else x, given)


class Parts:
    """The parts of fshard, by name."""

    def __init__(self, plan: fs.Plan, opt: Any, donate: bool = True, **options: Any) -> None:
        self.plan, self.opt, self.donate, self.options = plan, opt, donate, options
        self.made: dict[Any, Any] = {}

    def grad(self, name: str, params: Any, batch: Any, only: str | None = None) -> tuple[Any, Any]:
        """A loss and its gradient."""
        key = "grad", name, only
        if key not in self.made:
            aux = name == "weighted"
            self.made[key] = fs.value_and_grad(LOSSES[name], self.plan, only=only, has_aux=aux, **self.options)
        loss, grads = self.made[key](params, batch)
        return loss, grads

    def update(
        self, state: Any, grads: Any, only: str | None = None, clip: float | None = None, lr: float | None = None
    ) -> tuple[Any, Any]:
        """An update."""
        key = "update", only, clip
        if key not in self.made:
            self.made[key] = fs.make_update(self.opt, self.plan, only=only, clip_norm=clip, donate=self.donate)
        state, metrics = self.made[key](state, grads, lr=lr)
        return state, metrics.grad_norm

    def evaluate(self, name: str, state: Any, batch: Any) -> Any:
        """A loss alone."""
        key = "evaluate", name
        if key not in self.made:
            self.made[key] = fs.make_eval_step(lambda params, batch: {"loss": LOSSES[name](params, batch)}, self.plan)
        return self.made[key](state, batch)

    add = staticmethod(fs.tree.add)
    scale = staticmethod(fs.tree.scale)

    def norm(self, x: Any) -> Any:
        """The norm of a tree."""
        return fs.tree.norm(x, self.plan)


@dataclass(frozen=True)
class PlainState:
    """A state of whole tensors; ``counts`` are the updates of each leaf."""

    params: Any
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def replace(self, *, params: Any) -> "PlainState":
        """With other parameters."""
        return replace(self, params=params)


class Plain:
    """The same parts in plain PyTorch."""

    def __init__(self, opt: Any) -> None:
        self.opt = opt

    def grad(self, name: str, params: Any, batch: Any, only: str | None = None) -> tuple[Any, Any]:
        """A loss and its gradient."""
        params = params.params if isinstance(params, PlainState) else params
        flat = dict(tree.paths(params))
        chosen = {p: x for p, x in flat.items() if only is None or re.fullmatch(only, p)}

        def of(chosen: Any) -> Any:
            found = LOSSES[name](tree.nest({**flat, **chosen}), batch)
            head, aux = found if isinstance(found, tuple) else (found, {})
            value = head.value if isinstance(head, fs.Mean) else head
            return value, (value.detach(), {k: v.value.detach() for k, v in aux.items()})

        grads, (value, aux) = torch.func.grad(of, has_aux=True)(chosen)
        return ((value, aux) if name == "weighted" else value), tree.nest(grads)

    def evaluate(self, name: str, state: Any, batch: Any) -> Any:
        """A loss alone."""
        return {"loss": LOSSES[name](state.params, batch)}

    def update(
        self,
        state: PlainState,
        grads: Any,
        only: str | None = None,
        clip: float | None = None,
        lr: float | None = None,
    ) -> tuple[PlainState, Any]:
        """An update by AdamW or SGD."""
        rate = self.opt.lr if lr is None else lr
        flat, slopes = dict(tree.paths(state.params)), dict(tree.paths(grads))
        assert set(slopes) == {p for p in flat if only is None or re.fullmatch(only, p)}
        norm = torch.stack([g.square().sum() for g in slopes.values()]).sum().sqrt()
        factor = 1.0 if clip is None else min(1.0, clip / (norm.item() + 1e-6))
        firsts, seconds, counts = dict(state.first), dict(state.second), dict(state.counts)
        for path, grad in slopes.items():
            grad, count = grad * factor, counts.get(path, 0) + 1
            counts[path] = count
            if isinstance(self.opt, fs.optim.sgd):
                firsts[path] = grad if count == 1 else self.opt.momentum * firsts[path] + grad
                flat[path] = flat[path] - rate * firsts[path]
                continue
            b1, b2 = self.opt.betas
            firsts[path] = b1 * firsts.get(path, 0) + (1 - b1) * grad
            seconds[path] = b2 * seconds.get(path, 0) + (1 - b2) * grad.square()
            root = (seconds[path] / (1 - b2**count)).sqrt() + self.opt.eps
            flat[path] = flat[path] - rate / (1 - b1**count) * firsts[path] / root
        return replace(state, params=tree.nest(flat), first=firsts, second=seconds, counts=counts), norm

    @staticmethod
    def add(x: Any, y: Any, alpha: Any = 1.0) -> Any:
        """``x + alpha * y``."""
        more = dict(tree.paths(y))
        return tree.nest({p: leaf + alpha * more[p] if p in more else leaf for p, leaf in tree.paths(x)})

    @staticmethod
    def scale(x: Any, alpha: Any) -> Any:
        """``alpha * x``."""
        return tree.map(lambda leaf: alpha * leaf, x)

    @staticmethod
    def norm(x: Any) -> Any:
        """The norm of a tree."""
        return torch.stack([leaf.square().sum() for leaf in tree.leaves(x)]).sum().sqrt()


def ready(b: Any, state: Any, batch: Any) -> Any:
    """A train step."""
    loss, grads = b.grad("first", state, batch)
    state, norm = b.update(state, grads, clip=0.3)
    return state, {"loss": loss, "norm": norm}


def exact(b: Any, state: Any, batch: Any) -> Any:
    """A train step of an exact mean."""
    (loss, aux), grads = b.grad("weighted", state, batch)
    state, norm = b.update(state, grads)
    return state, {"loss": loss, "norm": norm, "kept": aux["kept"]}


def sam(b: Any, state: Any, batch: Any) -> Any:
    """Sharpness-aware minimization."""
    loss, grads = b.grad("first", state, batch)
    near = b.add(state.params, grads, 0.05 / (b.norm(grads) + 1e-12))
    _, grads = b.grad("first", near, batch)
    state, norm = b.update(state, grads)
    return state, {"loss": loss, "norm": norm}


def exact_sam(b: Any, state: Any, batch: Any) -> Any:
    """The same with an exact mean, whose gradients are read before the step is over."""
    (loss, _), grads = b.grad("weighted", state, batch)
    near = b.add(state.params, grads, 0.05 / (b.norm(grads) + 1e-12))
    (_, aux), grads = b.grad("weighted", near, batch)
    state, norm = b.update(state, grads, clip=0.5)
    return state, {"loss": loss, "norm": norm, "kept": aux["kept"]}


def together(b: Any, state: Any, batch: Any) -> Any:
    """A GAN whose players move at once."""
    d, to_dis = b.grad("real", state, batch, only=r"dis\..*")
    g, to_gen = b.grad("second", state, batch, only=r"gen\..*|scale")
    state, _ = b.update(state, to_dis, only=r"dis\..*")
    state, norm = b.update(state, to_gen, only=r"gen\..*|scale", clip=0.1)
    return state, {"d": d, "g": g, "norm": norm}


def in_turns(b: Any, state: Any, batch: Any) -> Any:
    """A GAN whose generator sees the discriminator after its move."""
    d, to_dis = b.grad("real", state, batch, only=r"dis\..*")
    state, norm = b.update(state, to_dis, only=r"dis\..*", clip=0.1)
    g, to_gen = b.grad("second", state, batch, only=r"gen\..*|scale")
    state, _ = b.update(state, to_gen, only=r"gen\..*|scale")
    return state, {"d": d, "g": g, "norm": norm}


def surgery(b: Any, state: Any, batch: Any) -> Any:
    """Two gradients of the same parameters, read after both."""
    one, left = b.grad("first", state, batch)
    two, right = b.grad("second", state, batch)
    size = b.norm(left)
    grads = b.add(b.scale(left, 0.5), right, 1.0 / (1.0 + size))
    state, norm = b.update(state, grads)
    return state, {"one": one, "two": two, "norm": norm}


def inner(b: Any, state: Any, batch: Any) -> Any:
    """Three updates in a row, and a step back towards where they began."""
    before, losses = state.params, []
    for _ in range(3):
        loss, grads = b.grad("first", state, batch)
        state, norm = b.update(state, grads)
        losses.append(loss)
    away = b.add(state.params, before, -1.0)
    return state, {"losses": losses, "norm": norm, "away": b.norm(away)}


def search(b: Any, state: Any, batch: Any) -> Any:
    """A loss decides how far to go, without Python seeing it."""
    before, grads = b.grad("first", state, batch)
    there, _ = b.grad("first", b.add(state.params, grads, -0.1), batch)
    grads = b.scale(grads, torch.where(there < before, 1.0, 0.1))
    state, norm = b.update(state, grads)
    return state, {"before": before, "there": there, "both": before + there, "norm": norm}


def lookahead(b: Any, state: Any, batch: Any) -> Any:
    """An update, and then half of the way back."""
    before = state.params
    loss, grads = b.grad("first", state, batch)
    state, norm = b.update(state, grads)
    state = state.replace(params=b.add(b.scale(before, 0.5), state.params, 0.5))
    return state, {"loss": loss, "norm": norm}


def watched(b: Any, state: Any, batch: Any) -> Any:
    """A train step that looks at another loss of the same parameters."""
    seen = b.evaluate("second", state, batch)
    loss, grads = b.grad("first", state, batch)
    state, norm = b.update(state, b.scale(grads, 1.0 / (1.0 + seen["loss"])))
    after = b.evaluate("second", state, batch)
    return state, {"loss": loss, "seen": seen["loss"], "after": after["loss"], "norm": norm}


def mapped(b: Any, state: Any, batch: Any) -> Any:
    """Arithmetic of the function's own, leaf by leaf, on parameters and gradients."""
    loss, grads = b.grad("first", state, batch)
    near = tree.map(lambda leaf, slope: leaf + 0.1 * slope, state.params, grads)
    _, grads = b.grad("second", near, batch)
    state, norm = b.update(state, tree.map(torch.tanh, grads))
    return state, {"loss": loss, "norm": norm}


FUNCTIONS = {
    f.__name__: f
    for f in (ready, exact, sam, exact_sam, together, in_turns, surgery, inner, search, lookahead, watched, mapped)
}


def trained(b: Any, name: str, state: Any, make: Callable[[Any], Any], steps: int, part: Callable[[Any], Any]) -> Any:
    """Some steps of a function: the states' parameters, and all metrics as numbers."""
    step = make(lambda state, batch: FUNCTIONS[name](b, state, batch))
    told = []
    for number in range(steps):
        state, metrics = step(state, part(batch(number)))
        told.append([float(x) for x in tree.leaves(metrics)])
    return state, told


def close(a: float, b: float) -> bool:
    """Whether two numbers agree to 1e-9."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
