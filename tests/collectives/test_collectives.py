"""Collectives over real gloo processes against plain functions of the values of all ranks."""

from typing import Any

import pytest
import torch

import fshard as fs
from tests.collectives.cases import cases, cotangents, pulled, values
from tests.shared.workers import Pools

MESHES = {
    1: [((1,), ("a",), "a")],
    2: [((2,), ("a",), "a"), ((1, 2), ("a", "b"), ("b", "a"))],
    3: [((3,), ("a",), "a")],
    4: [((4,), ("a",), "a"), ((2, 2), ("a", "b"), "a"), ((2, 2), ("a", "b"), "b"), ((2, 2), ("a", "b"), ("b", "a"))],
}


def wrong(sizes: tuple[int, ...], names: tuple[str, ...], axis: Any) -> list[str]:
    """On a rank: the cases whose value, pullback or tangent is not the plain one, bit for bit."""
    out = []
    with fs.make_mesh(sizes, names) as mesh:
        where = {"axis": axis, "mesh": mesh}
        axes = axis if isinstance(axis, tuple) else (axis,)
        n, here = mesh.axis_size(axes), mesh.index(axes)
        for number, case in enumerate(cases(n)):
            xs, ts = values(case, n, number), values(case, n, number + 100)
            gs = cotangents(case, xs, number)

            def call(x: torch.Tensor, case: Any = case) -> torch.Tensor:
                return case.call(x, **where)

            y, back = torch.func.vjp(call, xs[here])
            _, tangent = torch.func.jvp(call, (xs[here],), (ts[here],))
            leaf = xs[here].clone().requires_grad_()
            (grad,) = torch.autograd.grad(call(leaf), leaf, gs[here])
            want = pulled(case, xs, gs)[here]
            pairs = {
                "value": (y, case.plain(xs)[here]),
                "vjp": (back(gs[here])[0], want),
                "grad": (grad, want),
                "jvp": (tangent, case.plain(ts)[here]),
            }
            out += [f"{case}: {what}" for what, (got, plain) in pairs.items() if not _close(case, got, plain)]
    return out


def _close(case: Any, got: torch.Tensor, want: torch.Tensor) -> bool:
    if case.name == "pmean":  # a division
        return torch.allclose(got, want, rtol=1e-14, atol=1e-14)
    return torch.equal(got, want)


@pytest.mark.parametrize("world", [4, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2, 3))])
def test_values_and_derivatives_on_real_ranks(pool: Pools, world: int) -> None:
    for mesh in MESHES[world]:
        assert pool(world).run(wrong, *mesh) == [[]] * world, mesh
