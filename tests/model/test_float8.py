"""Products in float8 by rows, against the same roundings written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fshard.model.float8 import FLOAT8, LinearProduct, rounded_rows

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
Sizes = tuple[int, int, int]


def draw(seed: int, *shape: int) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-30, 30, (shape[0], 1), generator=generator)
    )


def exact(seed: int, *shape: int) -> Tensor:
    """Rows that rounding keeps, each with 448 times a power of two: sums of their products are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-8, 9, shape, generator=generator).float()
    whole[:, 0] = 448.0
    return whole * torch.exp2(torch.randint(-3, 4, (shape[0], 1), generator=generator))


def kept(x: Tensor) -> Tensor:
    """A matrix as rounding by rows leaves it, one row and one element after the other."""
    rows = []
    for row in x.float():
        scale = max(float(row.abs().max() / 448), torch.finfo(F32).tiny)
        rows.append((row / torch.tensor(scale)).to(FLOAT8).to(F64) * scale)
    return torch.stack(rows)


def emulated(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product, and the gradients of both factors, in float64 from rounded numbers."""
    scales = (w.abs().amax(1) / 448).to(F64)
    out = kept(x) @ kept(w).T
    by_x = kept(grad * scales.float()) @ (kept(w) / scales[:, None])
    return out, by_x, grad.to(BF16).to(F64).T @ x.to(BF16).to(F64)


def computed(x: Tensor, w: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = LinearProduct.apply(x, w, dtype)
    return out, *torch.autograd.grad(out, [x, w], grad)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40))
def test_a_row_is_rounded_by_its_own_largest_number(seed: int, n: int, m: int) -> None:
    x = draw(seed, n, m)
    payload, scales = rounded_rows(x)
    assert payload.dtype == FLOAT8 and scales.shape == (n, 1) and scales.dtype == F32
    assert payload.float().abs().amax(1).eq(448).all()
    assert torch.equal(payload.to(F64) * scales, kept(x))
    # Three bits of mantissa, and below 2**-6 of a scale steps of 2**-9.
    assert ((payload.to(F64) * scales - x).abs() <= x.abs() / 16 + scales * 2.0**-10).all()
    for number in range(n):
        alone, scale = rounded_rows(x[number : number + 1])
        assert torch.equal(alone.view(torch.uint8)[0], payload.view(torch.uint8)[number])
        assert torch.equal(scale[0], scales[number])


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    payload, scales = rounded_rows(torch.tensor([[0.0, -0.0], [float("inf"), 1.0], [float("nan"), 1.0], [1e-45, 0.0]]))
    values = payload.float() * scales
    assert values[0].eq(0).all() and not values[1:3].isfinite().all(1).any() and values[3].isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 16, 16), (5, 32, 16), (16, 16, 48)]), st.sampled_from([BF16, F32]))
def test_products_are_those_of_rounded_rows_bit_for_bit(seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    rows, n, m = sizes
    x, w, grad = exact(seed, rows, m), exact(seed + 1, n, m), exact(seed + 2, rows, n)
    grad = grad / (w.abs().amax(1) / 448)  # so that folding the scales in gives exact rows again
    found = computed(x, w, grad.to(dtype), dtype)
    for got, meant, kind in zip(found, emulated(x, w, grad.to(dtype)), (dtype, F32, F32), strict=True):
        assert got.dtype == kind and torch.equal(got, meant.to(BF16).to(kind))


def test_inputs_of_any_number_of_dims() -> None:
    x, w = torch.randn(2, 3, 16), torch.randn(32, 16)
    out = LinearProduct.apply(x, w, F32)
    assert out.shape == (2, 3, 32) and torch.equal(out[1, 2], LinearProduct.apply(x[1, 2], w, F32))
    assert LinearProduct.apply(x[:0], w, F32).shape == (0, 3, 32)


def test_folding_scales_into_gradients_costs_no_accuracy() -> None:
    """The gradient of the input, against a weight rounded again along its columns, and against one scale a tensor."""
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(512, 256, generator=generator)
    w = torch.randn(256, 256, generator=generator) * torch.rand(256, 1, generator=generator) * 0.02
    x, true = torch.zeros(512, 256), grad.double() @ w.double()

    def error(found: Tensor) -> float:
        return float((found.double() - true).norm() / true.norm())

    def whole(a: Tensor) -> Tensor:
        return (a / (a.abs().max() / 448)).to(FLOAT8).double() * (a.abs().max() / 448)

    ours = error(computed(x, w, grad, F32)[1])
    again = error(kept(grad) @ kept(w.T.contiguous()).T)
    tensorwise = error(whole(grad) @ whole(w))
    assert 0.03 < ours < 0.038 and ours < 1.01 * again and ours < tensorwise


def test_there_is_no_second_derivative() -> None:
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
    (slope,) = torch.autograd.grad(LinearProduct.apply(x, w, F32).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
