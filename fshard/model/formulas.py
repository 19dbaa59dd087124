"""Operators written in terms of others, because PyTorch's own have wrong or missing derivatives. See ``exact``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Maybe = Tensor | None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``F.layer_norm``."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.native_layer_norm``."""
    out, mean, scale = _normalized(input, tuple(range(-len(normalized_shape), 0)), eps)
    return _affine(out, weight, bias).to(input.dtype), mean, scale


def batch_norm(
    input: Tensor,
    running_mean: Maybe = None,
    running_var: Maybe = None,
    weight: Maybe = None,
    bias: Maybe = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``F.batch_norm``."""
    return _norm(F.batch_norm, (0,), input, running_mean, running_var, weight, bias, training, momentum, eps)


def native_batch_norm(
    input: Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.native_batch_norm``."""
    if not training:
        return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    out = batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    _, mean, scale = _normalized(input, (0, *range(2, input.dim())), eps)
    return out, mean.flatten(), scale.flatten()


def instance_norm(
    input: Tensor,
    running_mean: Maybe = None,
    running_var: Maybe = None,
    weight: Maybe = None,
    bias: Maybe = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``F.instance_norm``."""
    return _norm(F.instance_norm, (), input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def mse_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.mse_loss``."""
    return _weighted((input - target).square(), *args, **kwargs)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Maybe = None
) -> Tensor:
    """``F.huber_loss``."""
    apart = (input - target).abs()
    each = torch.where(apart <= delta, 0.5 * apart.square(), delta * (apart - 0.5 * delta))
    return _weighted(each if weight is None else each * weight, reduction=reduction)


def soft_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.soft_margin_loss``."""
    return _weighted(torch.log1p(torch.exp(-target * input)), *args, **kwargs)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``."""
    first, second = input.chunk(2, dim)
    return first * second.sigmoid()


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``torch._weight_norm``."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` in single operators: the fused ones have first derivatives only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def raw(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of torch.nn.functional with the order of arguments of that in torch."""
    return lambda input, weight, bias, mean, var, *args, **kwargs: norm(input, mean, var, weight, bias, *args, **kwargs)


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    scale = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return centred * scale, mean, scale


def _affine(x: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _norm(
    own: Callable[..., Tensor],
    dims: tuple[int, ...],
    input: Tensor,
    mean: Maybe,
    var: Maybe,
    weight: Maybe,
    bias: Maybe,
    training: bool,
    *rest: float,
) -> Tensor:
    """A norm of channels by the statistics of these dims and all spatial ones; ``own`` is PyTorch's function."""
    if not training:
        return own(input, mean, var, weight, bias, training, *rest)
    if mean is not None or var is not None:  # PyTorch's own writes them
        own(input, mean, var, None, None, True, *rest)
    out, _, _ = _normalized(input, (*dims, *range(2, input.dim())), rest[1])
    shape = (1, -1, *(1,) * (input.dim() - 2))
    return _affine(out, *(None if x is None else x.view(shape) for x in (weight, bias))).to(input.dtype)


def _weighted(
    each: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Maybe = None,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    each = each if weight is None else each * weight
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    return each.mean() if weight is None else each.sum() / weight.expand_as(each).sum()
