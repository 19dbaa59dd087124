"""Layers on the inputs of all samples at once, which leave the gradients of single samples by the cheapest rule.

The rows of a rank run together, under ``torch.vmap``, over a graph of plain autograd. Layers that have a rule of their
own leave that ``vmap``. Every other use of a leaf reads a row of it for each sample, without a copy, and its gradient
has a row for each sample.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard.torch_internals import batched, below_transforms, functorch, saved_tensors_hooks, transforms_depth
from fshard.transform.sample_refusals import hooked, refused, renormed
from fshard.transform.sample_tape import OUTSIDE, LayerPart, Place, SampleTape, Uses


class CaughtLeaf(NamedTuple):
    """A leaf, and what a function has for it.

    Attributes:
        path: the path of the leaf, or its number where no engine calls.
        leaf: the leaf.
        given: what the function has, which must live as long as its identity is known.
        turned: whether that is the transposed leaf.
    """

    path: Any
    leaf: Tensor
    given: Tensor
    turned: bool = False


Caught = dict[int, CaughtLeaf]
"""Leaves by the identity of what a function has for them."""


def caught(rows: Sequence[Tensor], paths: Sequence[Any], leaves: Sequence[Tensor]) -> Caught:
    """The leaves that are trained, by what a function is given for them."""
    found = zip(rows, paths, leaves, strict=True)
    return {id(row): CaughtLeaf(path, leaf, row) for row, path, leaf in found if leaf.requires_grad}


class RowsOf(torch.autograd.Function):
    """A leaf once for each sample, whose gradient goes elsewhere."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rows: int, hold: Callable[[Tensor], None]) -> Tensor:
        ctx.hold = hold
        return leaf.expand(rows, *leaf.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.hold(grad)
        return None, None, None


class LinearRows(torch.autograd.Function):
    """A linear layer on the inputs of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, uses: "Uses") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.turned, ctx.uses = turned, uses
        matrix, flat = weight if turned else weight.mT, x.reshape(-1, x.shape[-1])
        return _alone(flat @ matrix if bias is None else torch.addmm(bias, flat, matrix), x.shape[:-1])

    @staticmethod
    @once_differentiable
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
        return _alone(weight.index_select(0, x.flatten()), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat, slopes = x.reshape(len(x), -1), grad.reshape(len(grad), -1, grad.shape[-1])
        if ctx.padding is not None:
            slopes = slopes * (flat != ctx.padding).unsqueeze(-1)
        ctx.uses.put(weight, LayerPart("embedding", flat, slopes))
        return None, None, None, None


class WithoutPadding(torch.autograd.Function):
    """An embedding's output, whose gradient is zero where an index is that of padding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, padded: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.masked_fill(ctx.saved_tensors[0], 0.0), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()


class NormRows(torch.autograd.Function):
    """A layer norm of the inputs of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, uses: "Uses") -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.uses = uses
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        within = tuple(range(1, x.ndim - weight.ndim))
        slopes = grad * ((x - mean) * rstd)
        ctx.uses.hold((slopes.sum(within) if within else slopes).to(weight.dtype))
        ctx.uses.hold_bias(grad, within)
        back: Any = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            back = torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, wanted)[0]
        return back, None, None, None, None


def _read(x: Tensor) -> Tensor:
    """The values of a leaf as code outside of units has it; other tensors as they are."""
    return x if type(x) is Tensor else x.view_as(x)


def _alone(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows in another shape, which autograd takes for no view, so that code may go on in place."""
    out: Tensor = torch.ops.aten._unsafe_view(rows, (*shape, rows.shape[-1]))
    return out


class CaughtLayers(TorchFunctionMode):
    """Runs layers that read leaves on the inputs of all samples at once, beside the ``vmap`` around them.

    Args:
        tape: takes the gradients of samples.
        rows: the number of samples.
        device: the type of the device.
        place: the call of a unit that runs; None for one without an engine.
        leaves: its leaves, by the identity of what it has for them.

    Attributes:
        level: the number of transforms around the call.
        hooks: those on what autograd saves around it.
    """

    def __init__(
        self, tape: SampleTape, rows: int, device: str, place: Place | None = OUTSIDE, leaves: Caught | None = None
    ) -> None:
        super().__init__()
        self.tape, self.count, self.device, self.place = tape, rows, device, place
        self.level, self.leaves = transforms_depth(), leaves or {}
        self.hooks = saved_tensors_hooks(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if saved_tensors_hooks(False) != self.hooks:
            raise hooked(func, self._unit, self._paths((args, kwargs)))
        if kwargs.get("max_norm") is not None and (paths := self._paths(args)):
            raise renormed(func, self._unit, paths)
        rule = RULES.get(func)
        # Inside of a derivative that the loss takes itself, the output's gradient does not tell all of the weight's.
        if rule is not None and transforms_depth() == self.level and not torch.is_autocast_enabled(self.device):
            found = rule(self, *args, **kwargs)
            if found is not None:
                return found
        try:
            return (_padded_embedding if func is functional.embedding else func)(*args, **kwargs)
        except RuntimeError as error:
            if (told := refused(error, func, self._unit, self._paths((args, kwargs)))) is None:
                raise
            raise told from error

    @property
    def _unit(self) -> str:
        return "" if self.place is None else self.place[0]

    def _paths(self, given: Any) -> list[str]:
        """The paths of the leaves among arguments."""
        return [leaf.path for x in tree.leaves(given) if (leaf := self.leaves.get(id(x)))]

    def leaf(self, value: Any) -> CaughtLeaf | None:
        """The leaf that a value is; None for another value."""
        found = self.leaves.get(id(value))
        return None if found is None or found.turned else found

    def matrix(self, value: Any) -> CaughtLeaf | None:
        """The leaf that a value is, or that it is the transpose of, if it has two dims."""
        found = self.leaves.get(id(value))
        return None if found is None or found.leaf.ndim != 2 else found

    def rows(self, x: Tensor) -> Tensor:
        """A value of all samples, ``(rows, ...)``."""
        x = _read(x)
        if not functorch.is_batchedtensor(x):
            return x.expand(self.count, *x.shape)
        rows: Tensor = functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)
        return rows

    def run(self, function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
        """The output of a layer."""
        given = self.rows(x)
        with below_transforms(self.level - 1):
            out: Tensor = function.apply(given, *args)  # type: ignore[no-untyped-call]
        return batched(out, self.level)


def _linear(mode: CaughtLayers, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    found, beside = mode.matrix(weight), mode.leaf(bias)
    if found is None or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    uses = Uses(mode.tape, mode.place, found.path, beside.path if beside else None)
    out = mode.run(LinearRows, input, found.leaf, beside.leaf if beside else None, found.turned, uses)
    return out if bias is None or beside else out + bias


def _matmul(mode: CaughtLayers, input: Tensor, other: Any = None, **options: Any) -> Tensor | None:
    found = mode.matrix(other)
    if found is None or options or not isinstance(input, Tensor) or input.ndim == 0:
        return None
    return mode.run(LinearRows, input, found.leaf, None, not found.turned, Uses(mode.tape, mode.place, found.path))


def _turned(transpose: Callable[[Tensor], Tensor]) -> Callable[[CaughtLayers, Tensor], Tensor | None]:
    """A rule that knows the transpose of a leaf again."""

    def rule(mode: CaughtLayers, input: Tensor) -> Tensor | None:
        found = mode.matrix(input)
        if found is None:
            return None
        out = transpose(input)
        mode.leaves[id(out)] = CaughtLeaf(found.path, found.leaf, out, not found.turned)
        return out

    return rule


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
    found = mode.matrix(weight)
    if found is None or found.turned or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(found.leaf) + padding_idx
    return mode.run(EmbeddingRows, input, found.leaf, padding, Uses(mode.tape, mode.place, found.path))


def _padded_embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``F.embedding`` without a rule. Of a weight for each sample, PyTorch's rule for ``vmap`` forgets the padding."""
    out = functional.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return out
    masked: Tensor = WithoutPadding.apply(out, (input == padding_idx % len(weight)).unsqueeze(-1))  # type: ignore[no-untyped-call]
    return masked


def _layer_norm(
    mode: CaughtLayers,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    found, beside = mode.leaf(weight), mode.leaf(bias)
    if found is None or (bias is not None and beside is None) or [*found.leaf.shape] != [*normalized_shape]:
        return None
    uses = Uses(mode.tape, mode.place, found.path, beside.path if beside else None)
    return mode.run(NormRows, input, found.leaf, beside.leaf if beside else None, eps, uses)


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
    mask, count = None if attn_mask is None else _read(attn_mask), len(query)
    if dropout_p or not query.ndim == key.ndim == value.ndim == 4 or not count == len(key) == len(value):
        return None
    given = [mode.rows(x) for x in (query, key, value)]
    if mask is not None and (functorch.is_batchedtensor(mask) or (mask.ndim == 4 and len(mask) > 1)):
        mask = mode.rows(mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(count, -1, -1, -1))
        given.append(mask)
    with below_transforms(mode.level - 1):
        flat = [x.flatten(0, 1) for x in given]
        mask = mask if len(flat) == 3 else flat.pop()
        attend: Any = functional.scaled_dot_product_attention
        out = attend(*flat, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    found: Tensor = out.unflatten(0, given[0].shape[:2])
    return batched(found, mode.level)


HEADS = inspect.signature(functional.multi_head_attention_forward)
NONE = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
OFF = ("add_zero_attn", "need_weights", "use_separate_proj_weight")
PLAIN: dict[str, bool | None] = dict.fromkeys(NONE) | dict.fromkeys(OFF, False)
"""The options with which ``nn.MultiheadAttention`` is two linear layers around attention."""


def _added(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask as what is added to scores. One of bools is True where a position is left out."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(mask, -torch.inf)


def _heads(mode: CaughtLayers, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | None:
    """Self-attention of ``nn.MultiheadAttention``."""
    call = HEADS.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    x, weight = given["query"], given["in_proj_weight"]
    mask = _added(given["attn_mask"], x)
    plain = all([given[name] is value for name, value in PLAIN.items()]) and not (
        given["dropout_p"] and given["training"]
    )
    same = x is given["key"] and x is given["value"] and x.ndim == 3 and (mask is None or mask.ndim == 2)
    joined = _linear(mode, x, weight, given["in_proj_bias"]) if plain and same else None
    if joined is None:
        return None
    length, count, width = x.shape  # the first dim of a sample's own batch comes second
    heads = given["num_heads"]
    parts = joined.view(length, count, 3, heads, width // heads).permute(2, 1, 3, 0, 4)
    options = {"attn_mask": None if given["is_causal"] else mask, "is_causal": given["is_causal"]}
    mixed = _attention(mode, *parts, **options)
    attend: Any = functional.scaled_dot_product_attention
    mixed = attend(*parts, **options) if mixed is None else mixed
    flat, last = mixed.permute(2, 0, 1, 3).reshape(x.shape), (given["out_proj_weight"], given["out_proj_bias"])
    out = _linear(mode, flat, *last)
    return functional.linear(flat, *last) if out is None else out, None


RULES: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _heads,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.t: _turned(Tensor.t),
    Tensor.T.__get__: _turned(Tensor.T.__get__),  # type: ignore[attr-defined]
    Tensor.mT.__get__: _turned(Tensor.mT.__get__),  # type: ignore[attr-defined]
}
"""The layers that have a rule of their own."""
