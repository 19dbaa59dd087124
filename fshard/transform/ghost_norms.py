"""Gradients of single samples by one backward of plain autograd, each by the cheapest rule for the layer.

The rows of a rank run at once, under ``torch.vmap``, over a graph of plain autograd. The gradient of a sample by the
weight of a linear layer is ``G.T @ X``, for the inputs ``X`` and the gradients of the outputs ``G`` at the sample's
positions. Its squared norm is ``((G @ G.T) * (X @ X.T)).sum()`` (Goodfellow, "Efficient per-example gradient
computations", 2015; Li et al., "Large language models can be strong differentially private learners", 2022), and a
weighted sum over samples is one product of matrices. So layers keep ``X`` and ``G``, and the backward frees all else
(Bu et al., "Differentially private optimization on large model at small cost", 2023).

Every other use of a leaf reads a row of it for each sample, without a copy, and its gradient has a row for each
sample. Where a leaf is used in both ways, or by layers of different kinds, gradients are held and added up.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fshard.torch_internals import batched, below_transforms, functorch, transforms_depth

Flat = dict[str, Tensor]
Place = tuple[str, int]
"""A call of a unit: its name and number. Code outside of units has no name."""

OUTSIDE: Place = "", 0

Caught = dict[int, tuple[str, Tensor]]
"""Paths and leaves, by the identity of what a function is given for them."""


class LayerPart(NamedTuple):
    """The gradients of samples by a weight, from one call of a layer.

    Attributes:
        kind: ``linear``: the product of the others, summed over positions; or ``embedding``: gradients by indices.
        left: ``(rows, positions, width)``; of an embedding the indices, ``(rows, positions)``.
        right: ``(rows, positions, width)``.
    """

    kind: str
    left: Tensor
    right: Tensor

    def held(self, leaf: Tensor) -> Tensor:
        """The gradient of each sample, ``(rows, *shape)``."""
        if self.kind == "linear":  # products of one term each are no work for a product of matrices
            return self.left.mT @ self.right if self.left.shape[1] > 1 else self.left.mT * self.right
        rows = len(self.left)
        at = self.left + torch.arange(rows, device=self.left.device).unsqueeze(1) * len(leaf)
        return self._scattered(at, self.right, rows * len(leaf)).view(rows, *leaf.shape)

    def summed(self, leaf: Tensor, factor: Tensor) -> Tensor:
        """The sum of the samples' gradients, each times its factor."""
        weighted = self.right * factor.to(self.right).view(-1, 1, 1)
        if self.kind == "linear":
            return self.left.flatten(0, 1).mT @ weighted.flatten(0, 1)
        return self._scattered(self.left, weighted, len(leaf))

    @staticmethod
    def _scattered(at: Tensor, values: Tensor, count: int) -> Tensor:
        values = values.flatten(0, 1)
        return values.new_zeros(count, values.shape[-1]).index_add(0, at.flatten(), values)


@dataclass
class SampleTape:
    """The gradients of single samples that a backward has left.

    Attributes:
        ghosts: whether layers keep what their gradients are made of, in the place of these.
        rows: the number of samples.
        held: gradients, ``(rows, *shape)``, by call of a unit and path.
        layers: what layers kept, likewise.
    """

    ghosts: bool
    rows: int = 0
    held: dict[Place, Flat] = field(default_factory=dict)
    layers: dict[Place, dict[str, list[LayerPart]]] = field(default_factory=dict)

    def begin(self, rows: int) -> None:
        """Discard everything, for a backward of so many samples."""
        self.rows = rows
        self.held.clear()
        self.layers.clear()

    def hold(self, place: Place, path: str, grad: Tensor) -> None:
        """Add gradients of samples."""
        held = self.held.setdefault(place, {})
        held[path] = held[path] + grad if path in held else grad

    def put(self, place: Place, path: str, leaf: Tensor, part: LayerPart) -> None:
        """Take what the gradients of samples are made of."""
        if self.ghosts:
            self.layers.setdefault(place, {}).setdefault(path, []).append(part)
        else:
            self.hold(place, path, part.held(leaf))

    def norms(self, shapes: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The norm of each sample's gradient over all leaves, ``(rows,)``, given a tensor like each leaf."""
        found = []
        for path, leaf in shapes.items():
            parts = [part for at in self.layers.values() for part in at.get(path, ())]
            held = [at[path] for at in self.held.values() if path in at]
            if parts and (held or len({part.kind for part in parts}) > 1):
                held, parts = [*held, *[part.held(leaf) for part in parts]], []
            if held:
                whole = held[0] if len(held) == 1 else torch.stack(held).sum(0)
                found.append(whole.reshape(len(whole), -1).to(dtype).square().sum(1))
            if parts:
                found.append(_squares(parts, leaf, dtype))
        return torch.stack(found).sum(0).sqrt() if found else torch.zeros(self.rows, dtype=dtype)

    def summed(self, place: Place, shapes: Mapping[str, Tensor], factor: Tensor) -> Flat:
        """The sum of what a call has left of the samples' gradients, each times its factor. It is left out then."""
        out: Flat = {}
        held, layers = self.held.pop(place, {}), self.layers.pop(place, {})
        for path in dict.fromkeys((*held, *layers)):
            found = [torch.tensordot(factor.to(g), g, 1) for g in [held.pop(path)]] if path in held else []
            found += [part.summed(shapes[path], factor) for part in layers.pop(path, ())]
            out[path] = functools.reduce(torch.add, found)
        return out

    @property
    def places(self) -> list[Place]:
        """The calls that have left gradients."""
        return [*dict.fromkeys((*self.held, *self.layers))]


def _squares(parts: Sequence[LayerPart], leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The squared norm of each sample's gradient by a weight."""
    kind = parts[0].kind
    left = torch.cat([part.left for part in parts], 1) if len(parts) > 1 else parts[0].left
    right = (torch.cat([part.right for part in parts], 1) if len(parts) > 1 else parts[0].right).to(dtype)
    places = right.shape[1]
    if kind == "linear":
        left = left.to(dtype)
        if places == 1:
            return left.square().sum((1, 2)) * right.square().sum((1, 2))
    if places * places <= leaf.numel():
        pairs = right @ right.mT
        same = left @ left.mT if kind == "linear" else left.unsqueeze(1) == left.unsqueeze(2)
        return (pairs * same).sum((1, 2))
    # Long sequences: one gradient after the other is less than products of all positions.
    one = [LayerPart(kind, left[i : i + 1], right[i : i + 1]) for i in range(len(right))]
    return torch.cat([part.held(leaf).square().sum().view(1) for part in one])


class RowsOf(torch.autograd.Function):
    """A leaf once for each sample, whose gradient goes elsewhere."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rows: int, hold: Callable[[Tensor], None]) -> Tensor:
        ctx.hold = hold
        return leaf.expand(rows, *leaf.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.hold(grad)
        return None, None, None


class LinearRows(torch.autograd.Function):
    """A linear layer on the inputs of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, uses: "Uses") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.turned, ctx.uses = turned, uses
        return x @ weight if turned else functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat, slopes = [y.detach().reshape(len(y), -1, y.shape[-1]) for y in (x, grad)]
        pair = (flat, slopes) if ctx.turned else (slopes, flat)
        ctx.uses.put(weight, LayerPart("linear", *pair))
        ctx.uses.hold_bias(slopes)
        back = None if not ctx.needs_input_grad[0] else grad @ weight.mT if ctx.turned else grad @ weight
        return back, None, None, None, None


class EmbeddingRows(torch.autograd.Function):
    """An embedding of the indices of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int | None, uses: "Uses") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.uses = padding, uses
        return functional.embedding(x, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat, slopes = x.reshape(len(x), -1), grad.reshape(len(grad), -1, grad.shape[-1])
        if ctx.padding is not None:
            slopes = slopes * (flat != ctx.padding).unsqueeze(-1)
        ctx.uses.put(weight, LayerPart("embedding", flat, slopes))
        return None, None, None, None


class NormRows(torch.autograd.Function):
    """A layer norm of the inputs of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, uses: "Uses") -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.uses = uses
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        within = tuple(range(1, x.ndim - weight.ndim))
        slopes = grad * ((x - mean) * rstd)
        ctx.uses.hold(slopes.sum(within) if within else slopes)
        ctx.uses.hold_bias(grad, within)
        back: Any = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            back = torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, wanted)[0]
        return back, None, None, None, None


class Uses(NamedTuple):
    """Where the gradients of a layer's leaves go.

    Attributes:
        tape: takes them.
        place: the call of a unit.
        weight: the path of the weight.
        bias: the path of the bias; None if it has none.
    """

    tape: SampleTape
    place: Place
    weight: str
    bias: str | None = None

    def put(self, leaf: Tensor, part: LayerPart) -> None:
        """Take what the weight's gradient is made of."""
        self.tape.put(self.place, self.weight, leaf, part)

    def hold(self, grad: Tensor) -> None:
        """Take the weight's gradient."""
        self.tape.hold(self.place, self.weight, grad)

    def hold_bias(self, grad: Tensor, within: Sequence[int] = (1,)) -> None:
        """Take the bias's gradient, given that of the output and the dims of positions."""
        if self.bias is not None:
            summed = grad.sum(within) if any([grad.shape[dim] != 1 for dim in within]) else grad.squeeze(within)
            self.tape.hold(self.place, self.bias, summed)


class CaughtLayers(TorchFunctionMode):
    """Runs layers that read leaves on the inputs of all samples at once, beside the ``vmap`` around them.

    Args:
        tape: takes the gradients of samples.
        level: the number of transforms around the loss of a sample.
        device: the type of the device.

    Attributes:
        place: the call of a unit that runs.
        leaves: its leaves, by the identity of what the unit was given for them: path and leaf.
    """

    def __init__(self, tape: SampleTape, level: int, device: str) -> None:
        super().__init__()
        self.tape, self.level, self.device = tape, level, device
        self.place = OUTSIDE
        self.leaves: Caught = {}

    @contextmanager
    def within(self, place: Place, leaves: Caught) -> Iterator[None]:
        """Inside, a call of a unit runs."""
        before = self.place, self.leaves
        self.place, self.leaves = place, leaves
        try:
            yield
        finally:
            self.place, self.leaves = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        # Inside of a derivative that the loss takes itself, the output's gradient does not tell all of the weight's.
        if rule is not None and transforms_depth() == self.level and not torch.is_autocast_enabled(self.device):
            found = rule(self, *args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def leaf(self, value: Any, ndim: int = 0) -> tuple[str, Tensor] | None:
        """The path of a leaf, and the leaf; None for another value, or one of other dims."""
        found = self.leaves.get(id(value))
        return found if found is not None and (not ndim or found[1].ndim == ndim) else None

    def rows(self, x: Tensor) -> Tensor:
        """A value of all samples, ``(rows, ...)``."""
        if not functorch.is_batchedtensor(x):
            return x.expand(self.tape.rows, *x.shape)
        return functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)

    def run(self, function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
        """The output of a layer."""
        given = self.rows(x)
        with below_transforms(self.level - 1):
            out: Tensor = function.apply(given, *args)  # type: ignore[no-untyped-call]
        return batched(out, self.level)


def _linear(mode: CaughtLayers, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    found, beside = mode.leaf(weight, 2), mode.leaf(bias)
    if found is None:
        return None
    uses = Uses(mode.tape, mode.place, found[0], beside[0] if beside else None)
    out = mode.run(LinearRows, input, found[1], beside[1] if beside else None, False, uses)
    return out if bias is None or beside else out + bias


def _matmul(mode: CaughtLayers, input: Tensor, other: Any, **options: Any) -> Tensor | None:
    found = mode.leaf(other, 2)
    if found is None or options or not isinstance(input, Tensor) or input.ndim == 0:
        return None
    return mode.run(LinearRows, input, found[1], None, True, Uses(mode.tape, mode.place, found[0]))


def _embedding(
    mode: CaughtLayers,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    found = mode.leaf(weight, 2)
    if found is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(found[1]) + padding_idx
    return mode.run(EmbeddingRows, input, found[1], padding, Uses(mode.tape, mode.place, found[0]))


def _layer_norm(
    mode: CaughtLayers,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    found, beside = mode.leaf(weight), mode.leaf(bias)
    if found is None or (bias is not None and beside is None) or [*found[1].shape] != [*normalized_shape]:
        return None
    uses = Uses(mode.tape, mode.place, found[0], beside[0] if beside else None)
    return mode.run(NormRows, input, found[1], beside[1] if beside else None, eps, uses)


def _attention(
    mode: CaughtLayers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention has no rule for ``vmap``, and needs none: its first dims are batches."""
    if dropout_p or attn_mask is not None or not query.ndim == key.ndim == value.ndim == 4:
        return None
    given = [mode.rows(x) for x in (query, key, value)]
    with below_transforms(mode.level - 1):
        flat = [x.flatten(0, 1) for x in given]
        out = functional.scaled_dot_product_attention(*flat, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        out = out.unflatten(0, given[0].shape[:2])
    return batched(out, mode.level)


RULES: Mapping[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
}
"""The layers that have a rule of their own."""
