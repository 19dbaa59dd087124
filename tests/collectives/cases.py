"""Collectives in two forms: as each rank calls them, and as a plain function of the values of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import P
from fshard import collectives as c

Values = list[Tensor]


@dataclass(frozen=True)
class Case:
    """One call of a collective.

    Attributes:
        name: with its arguments.
        shape: of the argument on each of ``n`` ranks.
        call: ``call(x, axis, mesh)`` on a rank.
        plain: from the arguments of all ranks, by position along the axis, to their results.
        types: of the argument and of the result, V or I.
    """

    name: str
    shape: tuple[int, ...]
    call: Callable[..., Tensor]
    plain: Callable[[Values], Values]
    types: str = "VV"

    def __repr__(self) -> str:
        return self.name


def cases(n: int) -> list[Case]:
    """One of every kind, for an axis of ``n`` ranks."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    line = [(i + 1, i) for i in range(n - 1)]
    return [
        Case("psum", (3, 2), lambda x, **k: c.psum(x, **k), lambda xs: [sum(xs)] * n, "VI"),
        Case("psum of a large tensor", (17000,), lambda x, **k: c.psum(x, **k), lambda xs: [sum(xs)] * n, "VI"),
        Case("pmean", (3,), lambda x, **k: c.pmean(x, **k), lambda xs: [sum(xs) / n] * n, "VI"),
        Case("pvary", (2, 1), lambda x, **k: c.pvary(x, **k), lambda xs: xs, "IV"),
        *gathers(n, 0),
        *gathers(n, 1),
        *gathers(n, -1),
        *exchanges(n),
        ragged(n),
        Case("cut", (2 * n, 2), lambda x, axis, **k: c.cut(x, P(axis), **k), lambda xs: list(xs[0].chunk(n)), "IV"),
        Case("assemble", (3,), lambda x, axis, **k: c.assemble(x, P(axis), **k), lambda xs: [torch.cat(xs)] * n, "VI"),
        Case("ppermute round", (2, 2), lambda x, **k: c.ppermute(x, perm=ring, **k), lambda xs: _sent(xs, ring)),
        Case("ppermute down", (), lambda x, **k: c.ppermute(x, perm=line, **k), lambda xs: _sent(xs, line)),
    ]


def gathers(n: int, dim: int) -> list[Case]:
    """Gathers and scatters along a dim."""
    tall = (2 * n, 3 * n)
    at = dim % 2
    flat = (n, 3) if at == 0 else (3, n)
    cat, stack = (lambda xs: [torch.cat(xs, dim)] * n), (lambda xs: [torch.stack(xs, dim)] * n)

    def gather(tiled: bool, to: str) -> Callable[..., Tensor]:
        return lambda x, **k: c.all_gather(x, dim=dim, tiled=tiled, to=to, **k)

    return [
        Case(f"all_gather tiled {dim}", (2, 3), gather(True, "varying"), cat),
        Case(f"all_gather {dim}", (2,), gather(False, "varying"), stack),
        Case(f"all_gather tiled invariant {dim}", (2, 3), gather(True, "invariant"), cat, "VI"),
        Case(f"all_gather invariant {dim}", (2,), gather(False, "invariant"), stack, "VI"),
        Case(
            f"psum_scatter tiled {dim}",
            tall,
            lambda x, **k: c.psum_scatter(x, dim=dim, tiled=True, **k),
            lambda xs: list(sum(xs).chunk(n, dim)),  # type: ignore[attr-defined]
        ),
        Case(
            f"psum_scatter {dim}",
            flat,
            lambda x, **k: c.psum_scatter(x, dim=dim, **k),
            lambda xs: list(sum(xs).unbind(dim)),  # type: ignore[attr-defined]
        ),
    ]


def exchanges(n: int) -> list[Case]:
    """All-to-alls."""
    out = []
    for split, concat in ((0, 1), (1, 0), (1, 1), (-1, 0), (0, -1), (2, 0)):
        whole = [2, 3, 2]
        whole[split] = 2 * n
        exact = [2, 3, 2]
        exact[split] = n

        def tiled(x: Tensor, split: int = split, concat: int = concat, **k: Any) -> Tensor:
            return c.all_to_all(x, split_dim=split, concat_dim=concat, tiled=True, **k)

        def stacked(x: Tensor, split: int = split, concat: int = concat, **k: Any) -> Tensor:
            return c.all_to_all(x, split_dim=split, concat_dim=concat, **k)

        def plain_tiled(xs: Values, split: int = split, concat: int = concat) -> Values:
            return [torch.cat([x.chunk(n, split)[r] for x in xs], concat) for r in range(n)]

        def plain_stacked(xs: Values, split: int = split, concat: int = concat) -> Values:
            return [torch.stack([x.select(split, r) for x in xs], concat) for r in range(n)]

        out.append(Case(f"all_to_all tiled {split} {concat}", tuple(whole), tiled, plain_tiled))
        out.append(Case(f"all_to_all {split} {concat}", tuple(exact), stacked, plain_stacked))
    return out


def ragged(n: int) -> Case:
    """Rows in unequal numbers: rank ``r`` sends rank ``i`` as many as it gets from there."""
    numbers = [[1 + (r + i) % n for i in range(n)] for r in range(n)]

    def call(x: Tensor, axis: Any, mesh: Any = None) -> Tensor:
        mine = numbers[c.axis_index(axis, mesh=mesh)]
        return c.ragged_all_to_all(x, axis, mine, mine, mesh=mesh)

    def plain(xs: Values) -> Values:
        parts = [x.split(mine, -2) for x, mine in zip(xs, numbers, strict=True)]
        return [torch.cat([part[r] for part in parts], -2) for r in range(n)]

    return Case("ragged_all_to_all", (sum(numbers[0]), 2), call, plain)


def _sent(xs: Values, pairs: list[tuple[int, int]]) -> Values:
    out = [torch.zeros_like(x) for x in xs]
    for source, target in pairs:
        out[target] = xs[source]
    return out


def values(case: Case, n: int, seed: int, batch: tuple[int, ...] = ()) -> Values:
    """Small integers in float64, so that sums are exact; equal on all ranks where the argument is invariant."""
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randint(-9, 10, (*batch, *case.shape), generator=draw).double() for _ in range(n)]
    return [xs[0]] * n if case.types[0] == "I" else xs


def cotangents(case: Case, xs: Values, seed: int) -> Values:
    """What arrives at the results: equal on all ranks where they are invariant."""
    draw = torch.Generator().manual_seed(seed)
    gs = [torch.randint(-9, 10, y.shape, generator=draw).double() for y in case.plain(xs)]
    return [gs[0]] * len(xs) if case.types[1] == "I" else gs


def pulled(case: Case, xs: Values, gs: Values) -> Values:
    """The cotangents of all arguments, by plain autograd; an invariant value counts once, for all its copies."""
    roots = [x.clone().requires_grad_() for x in xs]
    if case.types[0] == "I":
        roots = [roots[0]] * len(xs)
    ys = case.plain(roots)
    count = 1 if case.types[1] == "I" else len(ys)
    total = sum(((y * g).sum() for y, g in zip(ys[:count], gs, strict=False)), 0 * roots[0].sum())
    return [torch.autograd.grad(total, root, retain_graph=True, materialize_grads=True)[0] for root in roots]


def curved(case: Case, xs: Values, ds: Values) -> tuple[Values, Values]:
    """For the sum of cubes of all results: its gradients, and their derivatives along ``ds``."""
    roots = [x.clone().requires_grad_() for x in xs]
    if case.types[0] == "I":
        roots = [roots[0]] * len(xs)
    ys = case.plain(roots)
    total = sum((y.pow(3).sum() for y in (ys[:1] if case.types[1] == "I" else ys)), 0 * roots[0].sum())
    first = [torch.autograd.grad(total, r, create_graph=True, materialize_grads=True)[0] for r in roots]
    count = 1 if case.types[0] == "I" else len(roots)
    along = sum(((g * d).sum() for g, d in zip(first[:count], ds, strict=False)), 0 * roots[0].sum())
    second = [torch.autograd.grad(along, r, retain_graph=True, materialize_grads=True)[0] for r in roots]
    return [g.detach() for g in first], second
