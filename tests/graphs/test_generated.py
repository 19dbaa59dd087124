"""Generated units: whatever ops they are made of, their graphs give the bits of their Python, or are not used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from tests.graphs.cases import params_of, rows, trained

Op = Callable[[Any, Tensor, Tensor], Tensor]
"""A step of a unit, ``(its parameters, its input, what it has computed) -> [rows, 6]``."""


def _written(p: Any, x: Tensor, y: Tensor) -> Tensor:
    z = y * 2
    z[:, 1:3] = y[:, :2] * p["b"][0]
    return z.add_(1).mul_(x)


def _normed(p: Any, x: Tensor, y: Tensor) -> Tensor:
    mean, var = torch.zeros(6), torch.ones(6)
    y = F.batch_norm(y, mean, var, p["w"][0], p["b"], training=True)
    return y + mean * var


def _spectrum(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(y, dim=1) * torch.view_as_complex(p["w"][:4, :2].contiguous()), n=6, dim=1)


OPS: dict[str, Op] = {
    "linear": lambda p, x, y: F.linear(y, p["w"], p["b"]),
    "again": lambda p, x, y: y @ p["w"] + x @ p["w"].t(),
    "rotated": lambda p, x, y: torch.view_as_real(
        torch.view_as_complex(y.unflatten(1, (3, 2)).contiguous()) * torch.polar(torch.ones(3), p["b"][:3])
    ).flatten(1),
    "conjugated": lambda p, x, y: (torch.complex(y, x).conj() * torch.complex(x, y)).imag,
    "magnitude": lambda p, x, y: torch.complex(y, p["b"].expand_as(y)).abs() + torch.complex(x, y).angle(),
    "spectrum": _spectrum,
    "views": lambda p, x, y: y.t().unflatten(0, (2, 3)).transpose(0, 1).reshape(6, -1).t(),
    "chunks": lambda p, x, y: torch.cat([part * n for n, part in enumerate(y.chunk(3, 1))], 1),
    "strides": lambda p, x, y: torch.stack([y[:, ::2], y[:, 1::2].flip(1)], 2).flatten(1),
    "written": _written,
    "indexed": lambda p, x, y: y[:, torch.tensor([5, 0, 0, 3, 2, 1])] * p["w"][torch.arange(1), 2],
    "dropped": lambda p, x, y: F.dropout(y, 0.5),
    "cast": lambda p, x, y: (y.to(torch.bfloat16) @ p["w"].to(torch.bfloat16)).float() + y.double().sin().float(),
    "chosen": lambda p, x, y: torch.where(y > 0, y * p["b"], torch.expm1(x)),
    "cumulated": lambda p, x, y: y.cumsum(1) / 6 + y.logcumsumexp(0),
    "sorted": lambda p, x, y: y.sort(1).values + y.topk(6, dim=1).values * p["b"],
    "summed": lambda p, x, y: torch.einsum("ij,kj,ik->ik", y, p["w"], x),
    "convolved": lambda p, x, y: F.conv1d(y.unsqueeze(1), p["w"][:2, :3].unsqueeze(1), padding=1).mean(1),
    "normed": _normed,
    "layered": lambda p, x, y: F.layer_norm(y, (6,), p["w"][0], p["b"]),
    "attended": lambda p, x, y: F.scaled_dot_product_attention(y[None], (x @ p["w"])[None], y[None])[0],
    "padded": lambda p, x, y: F.pad(y, (1, 1))[:, 1:-1].masked_fill(x > 1, 0.5),
    "bounded": lambda p, x, y: y.clamp(-1, 1) + torch.minimum(y, p["b"].sum()) + y.amax(1, keepdim=True),
}

Unit = tuple[list[str], str, bool]
"""The names of its ops, what it returns beside their result, and whether its input is given twice."""

UNITS = st.tuples(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4),
    st.sampled_from(("nothing", "input", "unused", "used", "integers", "number")),
    st.booleans(),
)


def built(ops: list[str], beside: str) -> Callable[..., Any]:
    """A unit's function."""

    def unit(p: Any, x: Tensor, z: Tensor) -> Any:
        y = x
        for name in ops:
            y = torch.tanh(OPS[name](p, z, y))
        other = {"input": x, "integers": (y > 0).sum(1), "number": 3.0}.get(beside, (y * x).sum(0))
        return y * p["b"], other

    return fs.unit(unit)


def check(units: list[Unit]) -> None:
    """Train generated units as graphs and as they are."""
    names = "abc"[: len(units)]
    made = [built(ops, beside) for ops, beside, _ in units]

    def loss(params: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for name, unit, (_, beside, twice) in zip(names, made, units, strict=True):
            y, other = unit(params[name], x, x if twice else x.detach() * 0.5)
            if beside != "unused" and beside != "integers":
                total = total + (other * y).mean() / 3
            x = y
        return total + x.square().mean()

    params = params_of(*names)
    for name in names:
        params[name]["b"] = torch.linspace(-1, 1, 6)
    seen = []
    for compile in (None, "fx"):
        torch.manual_seed(3)
        seen.append(trained(loss, params, [rows(n) for n in range(2)], compile))
    (_, want, leaves), (step, got, found) = seen
    assert want == got, step.units
    assert all(map(torch.equal, leaves, found)), step.units
    assert "not used" not in step.units, step.units


@pytest.mark.long
@given(st.lists(UNITS, min_size=1, max_size=3))
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_graphs_of_generated_units_give_their_bits(units: list[Unit]) -> None:
    check(units)


@pytest.mark.slow
@given(st.lists(UNITS, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_graphs_of_many_generated_units_give_their_bits(units: list[Unit]) -> None:
    check(units)
