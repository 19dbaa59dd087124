"""Computes operators in other ways where PyTorch's derivatives of them are wrong or missing.

Some formulas for derivatives read a result that PyTorch takes for a constant, such as the mean of a layer norm or the
factors of a linear solve. The first derivative is right; a derivative of it is silently wrong. The ``jvp`` of a custom
``torch.autograd.Function`` has the same fault under a second ``jvp``. A few operators have a wrong forward derivative,
or none. All of them are computed in other operators, or with forward derivatives taken by two reverse ones, which are
right: the pullback of a pullback is the pushforward.

``tests/model/test_derivatives.py`` compares operators in every order of derivatives with reverse over reverse, and so
finds the rows of the table below.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fshard.torch_internals import custom_function_call, functorch
from fshard.torch_internals import weight_norm as fused_weight_norm

Op = Callable[..., Any]
Maybe = Tensor | None


# Operators written in others, under their own names: ``RULES`` says when they are used.


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
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
    return _norm(F.instance_norm, (), input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def mse_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _weighted((input - target).square(), *args, **kwargs)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Maybe = None
) -> Tensor:
    apart = (input - target).abs()
    each = torch.where(apart <= delta, 0.5 * apart.square(), delta * (apart - 0.5 * delta))
    return _weighted(each if weight is None else each * weight, reduction=reduction)


def soft_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _weighted(torch.log1p(torch.exp(-target * input)), *args, **kwargs)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    first, second = input.chunk(2, dim)
    return first * second.sigmoid()


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    return _written(input, input * input.sigmoid(), inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    return _written(input, input * F.softplus(input).tanh(), inplace)


def _written(input: Tensor, value: Tensor, inplace: bool) -> Tensor:
    return input.copy_(value) if inplace else value


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
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


class Transforms(NamedTuple):
    """The active transforms."""

    order: int  # how many of them differentiate, plain autograd included
    forward: int  # how many of these take forward derivatives
    nested: bool  # whether a derivative of a forward derivative is taken


class OperatorRule(NamedTuple):
    """A condition on which an operator is computed in another way, and the formula; None for ``by_reverse``."""

    when: Callable[[Transforms], int]
    formula: Op | None = None


_nested, _forward = attrgetter("nested"), attrgetter("forward")


def _third(under: Transforms) -> bool:
    return under.nested or under.order > 2


def _twice(under: Transforms) -> bool:
    return under.forward > 1


def _second(under: Transforms) -> bool:
    return under.forward > 0 or under.order > 1


RULES: Mapping[Op, OperatorRule] = {
    # Formulas that take statistics, or factors of a matrix, for constants.
    F.layer_norm: OperatorRule(_third, layer_norm),
    torch.layer_norm: OperatorRule(_third, layer_norm),
    torch.native_layer_norm: OperatorRule(_third, native_layer_norm),
    F.batch_norm: OperatorRule(_third, batch_norm),
    torch.batch_norm: OperatorRule(_third, raw(batch_norm)),
    torch.native_batch_norm: OperatorRule(_third, native_batch_norm),
    F.instance_norm: OperatorRule(_third, instance_norm),
    torch.instance_norm: OperatorRule(_third, raw(instance_norm)),
    **{
        getattr(space, name): OperatorRule(_nested)
        for space in (torch, Tensor)
        for name in ("det", "logdet", "slogdet")
    },
    **{
        getattr(torch.linalg, name): OperatorRule(_nested)
        for name in ("det", "slogdet", "solve", "solve_ex", "tensorsolve", "householder_product", "eig", "eigvals")
    },
    # No forward derivative, or none of the gradient.
    F.mse_loss: OperatorRule(_forward, mse_loss),
    F.huber_loss: OperatorRule(_forward, huber_loss),
    F.soft_margin_loss: OperatorRule(_forward, soft_margin_loss),
    F.glu: OperatorRule(_forward, glu),
    # A formula for a forward derivative that has none itself, where PyTorch makes no graph.
    F.silu: OperatorRule(_twice, silu),
    F.mish: OperatorRule(_twice, mish),
    F.grid_sample: OperatorRule(_forward),
    torch.grid_sampler: OperatorRule(_forward),
    F.scaled_dot_product_attention: OperatorRule(_second, attention),
    # A wrong forward derivative, and a wrong second one.
    torch.cholesky_inverse: OperatorRule(_forward),
    torch.scatter_reduce: OperatorRule(_forward),
    torch.Tensor.scatter_reduce: OperatorRule(_forward),
    fused_weight_norm: OperatorRule(_second, weight_norm),
}
"""Operators whose derivatives are wrong or missing in PyTorch 2.11 to 2.13."""

_CUSTOM = custom_function_call
_JVP, _GRAD = functorch.TransformType.Jvp, functorch.TransformType.Grad


class Exact(TorchFunctionMode):
    """Computes the operators of the table so that their derivatives are right.

    ``by_reverse`` makes a function whose forward derivative is taken by reverse ones; ``used`` says whether an operator
    was computed in another way.
    """

    def __init__(self, by_reverse: Callable[[Op], Op]) -> None:
        super().__init__()
        self.by_reverse = by_reverse
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None:
            if func is _CUSTOM and not args[0].__module__.startswith("fshard.") and _active(args).forward > 1:
                self.used = True
                return self.by_reverse(args[0].apply)(*args[1:], **kwargs)
            return func(*args, **kwargs)
        if functorch.peek_interpreter_stack() is None or not rule.when(_active(args)):
            return func(*args, **kwargs)
        self.used = True
        return (rule.formula or self.by_reverse(func))(*args, **kwargs)


def _active(args: Any) -> Transforms:
    """The transforms that are active around an operator with these arguments."""
    stack = [level.key() for level in functorch.get_interpreter_stack() or ()]  # the outermost first
    kinds = [kind for kind in stack if kind in (_JVP, _GRAD)]
    recorded, forward = _recorded(args), kinds.count(_JVP)
    nested = forward > 0 and (recorded or kinds[0] == _GRAD or forward > 1)
    return Transforms(recorded + len(kinds), forward, nested)


def _recorded(args: Any) -> bool:
    """Tell whether plain autograd records operations on one of these tensors, outside of all transforms."""
    if not torch.is_grad_enabled():
        return False
    for tensor in args:
        while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            return True
    return False
