"""Modules made from a description: odd widths, ties, shared, empty and frozen leaves, buffers, complex arithmetic."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("mlp", "norm", "complex", "gate", "buffered", "empty", "frozen", "written", "parts", "own", "inner", "skipped")


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        width: of what goes from block to block; even, so that it can be seen as complex numbers.
        hidden: inside of a block.
        kinds: of the blocks.
        calls: the numbers of the blocks in the order in which they are called; some twice.
        tied: whether the head's weight is that of the first layer.
        units: as for ``fs.split``.
    """

    width: int
    hidden: int
    kinds: tuple[str, ...]
    calls: tuple[int, ...]
    tied: bool
    units: tuple[str, ...]


def draw(rng: random.Random) -> Shape:
    """A model at random."""
    kinds = tuple(rng.choice(KINDS) for _ in range(rng.randint(1, 4)))
    calls = list(range(len(kinds)))
    if rng.random() < 0.3:
        calls.insert(rng.randrange(len(calls) + 1), rng.randrange(len(kinds)))
    units = rng.choice([("blocks.*",), ("blocks.*", "inp", "out"), ("blocks.*",), ("blocks.0", "out"), ()])
    return Shape(2 * rng.randint(1, 4), rng.randint(1, 9), kinds, tuple(calls), rng.random() < 0.3, units)


class Cube(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x / 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * x


class Block(nn.Module):
    """One block: rows in, rows of the same width out, each row by itself."""

    def __init__(self, kind: str, width: int, hidden: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        if kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "complex":
            self.angle = nn.Parameter(torch.randn(width // 2))
        elif kind == "gate":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        elif kind == "buffered":
            self.register_buffer("mask", torch.rand(width))
        elif kind == "empty":
            self.nothing, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))
        elif kind == "frozen":
            self.up.weight.requires_grad_(False)
            self.down.weight.requires_grad_(False)
        elif kind == "inner":
            self.inner = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, deep: bool = True) -> Any:
        y = self.down(torch.tanh(self.up(self._before(x))))
        if self.kind == "written":
            y = y.clone()
            y[:, ::2].mul_(0.5)
        if self.kind == "own":
            y = Cube.apply(y)
        if self.kind == "inner":
            y = y + self.inner(x)
        if self.kind == "skipped" and not deep:
            y = y * 0.5
        if self.kind == "parts":
            return {"x": x + y, "more": (y.square(), None, "name")}
        return x + y

    def _before(self, x: Tensor) -> Tensor:
        if self.kind == "norm":
            x = self.norm(torch.cat([x, 2 * x.square()], 1)[:, : self.width] + 0.1 * x.square().flip(1))
        elif self.kind == "complex":
            turned = torch.view_as_complex(x.reshape(len(x), -1, 2)) * torch.polar(
                torch.ones_like(self.angle), self.angle
            )
            x = torch.view_as_real(turned * turned.conj() + turned).flatten(1)
        elif self.kind == "gate":
            x = x * self.scale + self.shift
        elif self.kind == "buffered":
            x = x * self.mask.to(x.dtype)
        elif self.kind == "empty":
            x = x + self.nothing.sum() + (self.rows @ self.rows.T).sum()
        return x


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.calls = shape.calls
        self.inp, self.out = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, shape.width)
        self.blocks = nn.ModuleList(Block(kind, shape.width, shape.hidden) for kind in shape.kinds)
        if shape.tied:
            self.out.weight = self.inp.weight

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        more = torch.zeros(len(x), 1, dtype=x.dtype)
        x = torch.tanh(self.inp(x))
        for number in self.calls:
            if number == len(self.blocks) - 1 and not deep and number:
                continue
            x = self.blocks[number](x, deep=deep)
            if isinstance(x, dict):
                more = more + x["more"][0].mean(1, keepdim=True)
                x = x["x"]
        y: Tensor = self.out(x) + 0.1 * more
        return y


def make(shape: Shape, seed: int, dtype: torch.dtype) -> Net:
    """The module, with the same values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(shape).to(dtype)
        with torch.no_grad():
            for leaf in net.parameters():
                leaf.add_(0.3 * torch.randn_like(leaf))
    return net
