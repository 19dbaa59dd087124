"""Products of linear layers in float8, with a scale for each row: ``fs.Precision(products="float8_rowwise")``.

A row of a matrix is rounded to float8_e4m3 after it is divided by its scale, its largest magnitude over 448. A product
sums over rows of both factors, so scales come out of the sum: ``x @ w.T`` is the product of the rounded factors, times
the scale of the row of ``x`` and that of the row of ``w``. The gradient of the input, ``g @ w``, sums over the rows of
``w``: their scales are multiplied into ``g`` before ``g`` is rounded, so the same rounded weight serves both products
and is not rounded a second time along its columns. The gradient of the weight is a product in bfloat16.

A scale depends on its row alone. So results do not depend on how many ranks share the rows of a batch.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard.errors import PlanError, UnitError
from fshard.torch_internals import saved_tensors_hooks, scaled_mm

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
LEAST = torch.finfo(torch.float32).tiny
"""The least scale: a row of zeros has it."""

MULTIPLE = 16
"""The sizes of a weight must be multiples of this many elements: kernels read 16 bytes at a time."""


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix ``(n, m)`` rounded by rows: float8_e4m3 ``(n, m)``, and float32 scales ``(n, 1)``.

    A row that is not finite has no finite product.

    >>> payload, scales = rounded_rows(torch.tensor([[0.5, -7.0], [0.0, 0.0]]))
    >>> payload.float() * scales
    tensor([[ 0.5000, -7.0000],
            [ 0.0000,  0.0000]])
    """
    wide = x.to(torch.float32)
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST)
    return (wide / scales).to(FLOAT8), scales


Rows = tuple[Tensor, Tensor]
"""A matrix rounded by rows: payload and scales."""

_ROWS = "_fshard_rows"


def attach_rows(weight: Tensor, rows: Rows | None) -> None:
    """Give a weight its rounded rows: it has a shape and a gradient, and no values. None takes them away."""
    setattr(weight, _ROWS, rows)


def rows_of(weight: Tensor) -> Rows | None:
    """The rounded rows of a weight; None of one that has values."""
    return getattr(weight, _ROWS, None)


class LinearProduct(torch.autograd.Function):
    """``LinearProduct.apply(x, weight, dtype, *rows)``: ``x @ weight.T`` in float8, ``(..., m)`` by ``(n, m)``.

    Without ``rows``, the rounded rows of the weight, these are made of it. It has first derivatives alone.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, dtype: torch.dtype, *rows: Tensor) -> Tensor:
        payload, scales = rounded_rows(x.reshape(-1, x.shape[-1]))
        rounded, factors = rows or rounded_rows(weight)
        out = scaled_mm(payload, rounded.t(), scales, factors.t(), out_dtype=torch.bfloat16)
        return out.to(dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], *inputs[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rows = ctx.saved_tensors
        by_x = by_weight = None
        flat = grad.reshape(-1, len(weight))
        if ctx.needs_input_grad[0]:
            rounded, factors = rows or rounded_rows(weight)
            payload, scales = rounded_rows(flat.to(torch.float32) * factors.t())
            columns = rounded.t().contiguous().t()
            ones = columns.new_ones((1, columns.shape[1]), dtype=torch.float32)
            by_x = scaled_mm(payload, columns, scales, ones, out_dtype=torch.bfloat16)
            by_x = by_x.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            given = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
            by_weight = (flat.to(torch.bfloat16).t() @ given).to(weight.dtype)
        return by_x, by_weight, None, *[None] * len(rows)


Weights = Mapping[int, str]
"""The paths of weights by the identities of their tensors."""


class ScaledProducts(TorchFunctionMode):
    """Computes linear layers of some weights in float8. No other operator may read these weights."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights, self._hooks = weights, saved_tensors_hooks(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        result = func(*args, **kwargs)
        for x in (*args, *kwargs.values()):
            for tensor in x if isinstance(x, (list, tuple)) else (x,):
                if id(tensor) in self._weights and _reads(func, result):
                    name = getattr(func, "__name__", func)
                    raise read_otherwise(self._weights[id(tensor)], f"by {name} in a unit")
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        path = self._weights.get(id(weight))
        if id(input) in self._weights:
            raise read_otherwise(self._weights[id(input)], "as the input of a linear layer")
        cast = torch.is_autocast_enabled(input.device.type)
        fits = input.shape[-1:] == weight.shape[-1:] and (cast or input.dtype == weight.dtype)
        if path is None or not fits:  # torch has its own errors for the latter
            return functional.linear(input, weight, bias)
        if saved_tensors_hooks(False) != self._hooks:
            raise UnitError(
                f"a unit keeps what its linear layer {path} saves by hooks of its own, such as those of "
                f"torch.utils.checkpoint, and would compute the layer again without float8: use make_train_step("
                f"remat='all'), or give {path} a rule with precision=fs.Precision()"
            )
        dtype = torch.get_autocast_dtype(input.device.type) if cast else input.dtype
        out: Tensor = LinearProduct.apply(input, weight, dtype, *(rows_of(weight) or ()))  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(dtype)


READING = frozenset(("__setitem__", "tolist", "numpy", "__array__", "equal", "allclose", "item", "__contains__"))
"""Functions that read the values of a tensor, and return none."""


def _reads(func: Any, result: Any) -> bool:
    """Tell whether a function has read values, and not just a shape or a dtype."""
    made = result if isinstance(result, (list, tuple)) else (result,)
    return any(isinstance(x, Tensor) for x in made) or getattr(func, "__name__", "") in READING


def read_otherwise(path: str, where: str) -> PlanError:
    """The error of a weight that something else than a linear layer of a unit reads."""
    return PlanError(
        f"{path} is to be multiplied in float8, which a linear layer (F.linear) inside of a unit does, and it is read "
        f"{where}: give it a rule of its own before the others, fs.Rule({path!r}, ..., precision=fs.Precision()), "
        f"which keeps it as it is"
    )


Places = tuple[tuple[int, str], ...]
"""The numbers and paths, among the leaves of a unit's tree, of the weights that it multiplies in float8."""


def scaled(fn: Callable[..., Any], places: Places) -> Callable[..., Any]:
    """A unit's function ``fn(params, ...)``, whose linear layers multiply these weights in float8."""
    made = functools.partial(_called, places, fn)
    vars(made)["__name__"] = getattr(fn, "__name__", "unit")
    if kind := getattr(fn, "kind", None):  # see the function of a split module's unit
        vars(made)["kind"] = lambda: ("float8", tuple(number for number, _ in places), kind())
        vars(made)["tables"] = vars(fn)["tables"]
    return made


def prepared(prepare: Callable[[Any], Callable[..., Any]], places: Places, params: Any) -> Callable[..., Any]:
    """The same of a unit that is prepared once for many calls with one tree."""
    return functools.partial(_within, _found(places, params), prepare(params))


def _called(places: Places, fn: Callable[..., Any], params: Any, /, *args: Any, **kwargs: Any) -> Any:
    with ScaledProducts(_found(places, params)):
        return fn(params, *args, **kwargs)


def _within(weights: Weights, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with ScaledProducts(weights):
        return fn(*args, **kwargs)


def _found(places: Places, params: Any) -> Weights:
    leaves = tree.leaves(params)
    return {id(leaves[number]): path for number, path in places}
