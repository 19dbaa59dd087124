"""Random nests of transforms of a scalar function of a tree: each is run on shards and on whole leaves alike."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree

F = torch.func
ORDERS = 3
Fn = Callable[[Any], Any]


@dataclass(frozen=True)
class Point:
    """Where derivatives are taken.

    Attributes:
        params: the tree.
        v: a direction.
        dot: the inner product of two trees, over all ranks.
    """

    params: Any
    v: Any
    dot: Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Layer:
    """A transform of a function.

    Attributes:
        takes: ``s`` for functions whose values are scalars, ``t`` for trees like the parameters.
        gives: the same of the result.
        orders: the derivatives that it takes.
        make: the function of a function and a point.
    """

    takes: str
    gives: str
    orders: int
    make: Callable[[Fn, Point], Fn]


def _two() -> Tensor:
    return torch.tensor([1.0, -0.5]).double()


def _stacked(x: Any) -> Any:
    return tree.map(lambda leaf: torch.stack([leaf, leaf * 0.75]), x)


def _mixed(x: Any) -> Any:
    return tree.map(lambda leaf: torch.tensordot(_two(), leaf, 1), x)


def _along(f: Fn, at: Point) -> Fn:
    return lambda p: F.jvp(f, (p,), (at.v,))[1]


def _directions(f: Fn, at: Point) -> Fn:
    return lambda p: _mixed(torch.vmap(lambda v: F.jvp(f, (p,), (v,))[1])(_stacked(at.v)))


def _step(f: Fn, at: Point) -> Fn:
    return lambda p: f(tree.map(lambda x, g: x - 0.1 * g, p, F.grad(f)(p)))


LAYERS = {
    "grad": Layer("s", "t", 1, lambda f, at: F.grad(f)),
    "value and grad": Layer("s", "t", 1, lambda f, at: lambda p: F.grad_and_value(f)(p)[0]),
    "vjp": Layer("s", "t", 1, lambda f, at: lambda p: F.vjp(f, p)[1](torch.tensor(0.7).double())[0]),
    "jacrev": Layer("s", "t", 1, lambda f, at: F.jacrev(f)),
    "jvp": Layer("s", "s", 1, _along),
    "directions": Layer("s", "s", 1, _directions),
    "step": Layer("s", "s", 1, _step),
    "square": Layer("s", "s", 0, lambda f, at: lambda p: f(p).square()),
    "ensemble": Layer("s", "s", 0, lambda f, at: lambda p: _mixed(torch.vmap(f)(_stacked(p)))),
    "jvp of tree": Layer("t", "t", 1, _along),
    "pull": Layer("t", "t", 1, lambda f, at: lambda p: F.vjp(f, p)[1](at.v)[0]),
    "directions of tree": Layer("t", "t", 1, _directions),
    "ensemble of trees": Layer("t", "t", 0, lambda f, at: lambda p: _mixed(torch.vmap(f)(_stacked(p)))),
    "dot": Layer("t", "s", 0, lambda f, at: lambda p: at.dot(at.v, f(p))),
}

BASES = {
    "loss": ("s", 0),
    "parts": ("s", 0),
    "slope": ("s", 1),
    "value_and_grad": ("t", 1),
    "hvp": ("t", 2),
    "gnvp": ("t", 2),
}
"""What a nest is of: ``sharded_loss``, the same by ``vmap`` over parts of the batch, and tools."""


def draw_nest(draw: random.Random) -> tuple[str, ...]:
    """A base, and transforms from the innermost to the outermost."""
    base = draw.choices([*BASES], weights=[6, 2, 1, 2, 2, 1])[0]
    (kind, orders), nest = BASES[base], [base]
    for _ in range(draw.randint(0, 4)):
        fitting = [name for name, layer in LAYERS.items() if layer.takes == kind and orders + layer.orders <= ORDERS]
        name = draw.choice(fitting)
        nest.append(name)
        kind, orders = LAYERS[name].gives, orders + LAYERS[name].orders
    return tuple(nest)


def nested(base: Fn, names: tuple[str, ...], at: Point) -> Fn:
    """The function under the transforms."""
    for name in names:
        base = LAYERS[name].make(base, at)
    return base
