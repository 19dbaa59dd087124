"""Random programs: units of several kinds, called in any order and more than once, and code between them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs
from fshard import P, tree

WIDTH, ROWS = 6, 12

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "bell": lambda x: torch.exp(-x.square()),
    "softmax": lambda x: x.softmax(-1),
}
RULES = (P(), fs.fsdp("shard"), P("shard"))
"""Leaves that are replicated, ranges of a flat buffer, and cut along a dim."""


def residual(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A residual perceptron with a gain."""
    return lambda p, x: x + act(x @ p["w"].T + p["b"]) @ p["o"].T * p["g"]


def gate(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """One input gates what a map makes of another one, which comes by name."""
    return lambda p, x, other: act(x @ p["w"].T @ p["o"].T) * other + p["g"]


def norm(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A norm of each row by hand."""

    def call(p: Any, x: Tensor) -> Tensor:
        moved = x - x.mean(-1, keepdim=True)
        return act(moved / (moved.square().mean(-1, keepdim=True) + 0.1).sqrt() * p["g"]) + x @ p["o"] @ p["b"][:, None]

    return call


def table(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Rows of a weight by index, and a number beside tensors."""
    return lambda p, x, at, power: act(p["o"].T[at] + x) ** power + p["g"]


def several(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Two results and a number, in a dict."""

    def call(p: Any, x: Tensor) -> Any:
        hidden = act(x @ p["w"].T + p["b"])
        return {"x": hidden @ p["o"].T, "extra": (hidden.square().mean(-1, keepdim=True) + p["g"].sum(), 3)}

    return call


def attention(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Columns attend to each other."""

    def call(p: Any, x: Tensor) -> Tensor:
        scores = (x.unsqueeze(-1) * x.unsqueeze(-2) * p["g"]).softmax(-1)
        return (scores @ act(x.unsqueeze(-1))).squeeze(-1) + x

    return call


def perceptron(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A perceptron."""
    return lambda p, x: x + act(x @ p["w"].T + p["b"]) @ p["o"].T


def again(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A perceptron that is computed again in each derivative."""
    inner = fs.remat(lambda w, b, x: act(x @ w.T + b))
    return lambda p, x: x + inner(p["w"], p["b"], x) @ p["o"].T


KINDS = {kind.__name__: kind for kind in (residual, gate, norm, table, several, attention, again)}
BETWEEN = ("scale", "total", "stopped", "inner", "plain")


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        seed: of the weights and the batch.
        units: the kind and the activation of each unit.
        calls: the units in the order in which they are called, and what the code after each does.
        rules: the spec of each leaf, by path.
        weighted: whether the loss is an ``fs.Mean``.
    """

    seed: int
    units: tuple[tuple[str, str], ...]
    calls: tuple[tuple[int, str], ...]
    rules: tuple[tuple[str, Any], ...]
    weighted: bool

    def params(self, seed: int = 0) -> dict[str, Any]:
        """Whole leaves. Frozen ones are zero in directions, whose seeds are others."""
        draw = torch.Generator().manual_seed(10 * self.seed + seed)
        flat = {path: torch.randn(shape, generator=draw).double() / 2 for path, shape in shapes(len(self.units))}
        if seed:
            flat["frozen"].zero_()
        return tree.nest(flat)

    def batch(self) -> dict[str, Tensor]:
        """The global batch."""
        draw = torch.Generator().manual_seed(10 * self.seed + 9)
        x, y = torch.randn(2, ROWS, WIDTH, generator=draw).double().unbind()
        return {"x": x, "y": y, "at": torch.arange(ROWS) % 4, "n": torch.arange(1, ROWS + 1).double()}

    def plan(self, mesh: fs.Mesh) -> fs.Plan:
        """The plan of the parameters."""
        names = tuple([f"u{number}" for number in range(len(self.units))])
        model = SimpleNamespace(params=self.params(), units=names, frozen=frozenset({"frozen"}))
        return fs.make_plan(model, mesh, self.rules, batch=P("shard"))

    def predict(self, params: Any, batch: Any, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The outputs, ``(rows, width)``. ``total`` adds up over ranks; None where nothing is sharded."""
        kinds = {**KINDS, "again": perceptron} if total is None else KINDS
        made = [fs.unit(kinds[kind](ACTIVATIONS[act])) for kind, act in self.units]
        x = batch["x"] + params["frozen"]
        for number, after in self.calls:
            kind, p = self.units[number][0], params[f"u{number}"]
            more = {"gate": {"other": batch["y"]}, "table": {"at": batch["at"], "power": 2}}.get(kind, {})
            out = made[number](p, x, **more)
            x = out["x"] * out["extra"][0] / out["extra"][1] if kind == "several" else out
            if after == "scale":
                x = x * params["scale"] + params["shift"]
            elif after == "total":
                x = x - (x.sum(0) if total is None else total(x.sum(0))) / ROWS
            elif after == "stopped":
                x = x + torch.sin(x.detach())
            elif after == "inner" and kind in ("residual", "norm", "attention", "again"):
                x = x + torch.func.jvp(lambda x, n=number: made[n](params[f"u{n}"], x), (x,), (torch.cos(x),))[1]
        return x

    def of(self, out: Tensor, batch: Any) -> Any:
        """The loss of outputs."""
        losses = (torch.tanh(out) - batch["y"]).square().mean(1)
        return fs.Mean((losses * batch["n"]).sum(), batch["n"].sum()) if self.weighted else losses.mean()

    def loss(self, total: Callable[[Tensor], Tensor] | None = None) -> Callable[[Any, Any], Any]:
        """The loss function."""
        return lambda params, batch: self.of(self.predict(params, batch, total), batch)


def shapes(units: int) -> list[tuple[str, tuple[int, ...]]]:
    """The leaves of a program: of each unit, and of the code between units."""
    one = {"w": (5, WIDTH), "b": (5,), "o": (WIDTH, 5), "g": (WIDTH,)}
    found = [(f"u{number}.{name}", shape) for number in range(units) for name, shape in one.items()]
    return [*found, ("scale", ()), ("shift", (WIDTH,)), ("frozen", (WIDTH,))]


def draw_program(draw: random.Random) -> Program:
    """A random program."""
    units = tuple([(draw.choice(list(KINDS)), draw.choice(list(ACTIVATIONS))) for _ in range(draw.randint(1, 3))])
    units = tuple([(kind, "softplus" if kind == "table" else act) for kind, act in units])
    order = [*range(len(units)), *draw.choices(range(len(units)), k=draw.randint(0, 2))]
    draw.shuffle(order)
    calls = tuple([(number, draw.choice(BETWEEN)) for number in order])
    rules: list[tuple[str, Any]] = []
    for path, shape in shapes(len(units)):
        cut = shape and shape[0] % 6 == 0
        rules.append((path, draw.choice(RULES if cut else RULES[:2]) if shape else RULES[0]))
    return Program(draw.randrange(1000), units, calls, tuple(rules), draw.random() < 0.5)
