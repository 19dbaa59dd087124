"""Norms and sums of gradients of single samples that are never held, from what layers read and what reaches them.

The gradient of a sample by the weight of a linear layer is ``G.T @ X``, for the inputs ``X`` and the gradients of the
outputs ``G`` at the sample's positions. Its squared norm is ``((G @ G.T) * (X @ X.T)).sum()`` (Goodfellow, "Efficient
per-example gradient computations", 2015; Li et al., "Large language models can be strong differentially private
learners", 2022), and a weighted sum over samples is one product of matrices.

A first row tells which weights are read by such layers alone: those that no gradient reaches when these layers read
them detached. So a use that this file does not know of is never missed. The gradient of that row is then computed in
both ways, and layers are left to the general one unless both agree.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fshard.model.remat_function import exact
from fshard.torch_internals import functorch

Flat = dict[str, Tensor]
Row = Callable[[Mapping[str, Tensor], list[Tensor]], Tensor]
"""A loss of parameters and of the tensors of one row."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer by the loss function.

    Attributes:
        path: of its weight.
        kind: ``linear`` or ``embedding``.
        shape: of its output, for one row.
        padding: the row of an embedding's weight that gets no gradient; None without one.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    padding: int | None = None


class CaughtLayers(TorchFunctionMode):
    """Layers read their weights detached, and each adds a probe to its output, whose gradient is that of the output."""

    def __init__(self, weights: Mapping[str, Tensor], probes: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._paths = {id(weight): path for path, weight in weights.items()}
        self._probes, self._depth = probes, _depth()
        self.calls: list[LayerCall] = []
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _linear if func is functional.linear else _embedding if func is functional.embedding else None
        # Inside of a derivative that the loss takes itself, the output's gradient does not tell all of the weight's.
        caught = None if found is None or _depth() != self._depth else found(*args, **kwargs)
        path = None if caught is None else self._paths.get(id(caught[1]))
        if caught is None or path is None:
            return func(*args, **kwargs)
        x, weight, padding, call = caught
        out: Tensor = call(weight.detach())
        self.calls.append(
            LayerCall(path, "linear" if func is functional.linear else "embedding", (*out.shape,), padding)
        )
        self.inputs.append(x.detach())
        if self._probes is None:
            return out
        return out + self._probes[len(self.calls) - 1]


def _depth() -> int:
    """The number of transforms of torch.func around."""
    return len(functorch.get_interpreter_stack() or ())


Caught = tuple[Tensor, Tensor, int | None, Callable[[Tensor], Tensor]]
"""The input of a layer, its weight, its padding, and the layer as a function of the weight."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Caught:
    return input, weight, None, lambda w: functional.linear(input, w, bias)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Caught | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    return input, weight, padding, lambda w: functional.embedding(input, w, padding_idx)


def proved_layers(loss: Row, leaves: Flat, paths: Sequence[str], rows: list[Tensor]) -> list[LayerCall]:
    """The calls of layers whose weights nothing else reads, when the first row's gradient is the general one's."""
    first = [x[:1] for x in rows]
    calls = _layers_of(loss, leaves, paths, [x[0] for x in rows])
    found = sample_gradients(loss, leaves, paths, first, calls) if calls else None
    if found is None:
        return []
    some = list(dict.fromkeys(call.path for call in calls))
    general = sample_gradients(loss, leaves, some, first, ())
    one = torch.ones(1, device=leaves[some[0]].device)
    ours = found.summed(leaves, one)
    for path in some if general is not None else ():
        meant = general.held[path][0]  # type: ignore[union-attr]
        bound = torch.finfo(meant.dtype).eps ** 0.5 * meant.norm()
        if not bool((ours[path] - meant).norm() <= bound):
            return []
    return calls


def _layers_of(loss: Row, leaves: Flat, paths: Sequence[str], row: list[Tensor]) -> list[LayerCall]:
    """The calls of layers whose weights nothing else reads, found by one row.

    Empty if the row cannot tell: then gradients of samples are computed as for any function.
    """
    own = {path: leaf.detach().requires_grad_(path in paths) for path, leaf in leaves.items()}
    matrices = {path: own[path] for path in paths if leaves[path].ndim == 2}
    try:
        with torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(exact())
            mode = stack.enter_context(CaughtLayers(matrices))
            value = loss(own, row)
        every = [*matrices.values()]
        reached = torch.autograd.grad(value, every, allow_unused=True) if value.requires_grad else [None] * len(every)
    except (RuntimeError, TypeError, ValueError):  # the general path raises it, or can do without
        return []
    alone = {path for path, slope in zip(matrices, reached, strict=True) if slope is None}
    kinds = {(call.path, call.kind) for call in mode.calls}
    several = {path for path, _ in kinds if len([1 for other, _ in kinds if other == path]) > 1}
    return [call for call in mode.calls if call.path in alone - several]


@dataclass(frozen=True)
class SampleGradients:
    """The gradients of some rows.

    Attributes:
        held: the gradient of each row by the leaves of all other uses, ``(rows, *shape)``.
        layers: for each call of a layer, its inputs and the gradients of its outputs, ``(rows, ..., width)``.
    """

    held: Flat
    layers: list[tuple[LayerCall, Tensor, Tensor]] = field(default_factory=list)

    def squares(self, leaves: Flat, dtype: torch.dtype) -> Tensor:
        """The squared norm of each row's gradient, ``(rows,)``."""
        found = [g.reshape(len(g), -1).to(dtype).square().sum(1) for g in self.held.values()]
        for path, (kind, x, g) in self._by_weight().items():
            count, places = leaves[path].numel(), g.shape[1]
            if places == 1 and kind == "linear":
                found.append(x.to(dtype).square().sum((1, 2)) * g.to(dtype).square().sum((1, 2)))
            elif places * places <= count:
                found.append(_gram(kind, x, g.to(dtype)))
            else:  # long sequences: one gradient after the other is less than products of all positions
                found.append(
                    torch.stack(
                        [
                            _sum(kind, one, slope.to(dtype), leaves[path]).square().sum()
                            for one, slope in zip(x, g, strict=True)
                        ]
                    )
                )
        return torch.stack(found).sum(0)

    def summed(self, leaves: Flat, factor: Tensor) -> Flat:
        """The sum of the rows' gradients, each times its factor."""
        out = {path: torch.tensordot(factor.to(g), g, 1) for path, g in self.held.items()}
        for path, (kind, x, g) in self._by_weight().items():
            weighted = g * factor.to(g).view(-1, 1, 1)
            out[path] = _sum(kind, x.flatten(0, 1), weighted.flatten(0, 1), leaves[path])
        return out

    def _by_weight(self) -> dict[str, tuple[str, Tensor, Tensor]]:
        """For each weight the kind of its layers, and what they read and got at all positions of each row."""
        parts: dict[str, tuple[str, list[Tensor], list[Tensor]]] = {}
        for call, x, g in self.layers:
            inputs, slopes = parts.setdefault(call.path, (call.kind, [], []))[1:]
            slopes.append(g.reshape(len(g), -1, g.shape[-1]))
            if call.kind == "linear":
                inputs.append(x.reshape(len(x), -1, x.shape[-1]))
                continue
            inputs.append(x.reshape(len(x), -1))
            if call.padding is not None:
                slopes[-1] = slopes[-1] * (inputs[-1] != call.padding).unsqueeze(-1)
        return {path: (kind, torch.cat(x, 1), torch.cat(g, 1)) for path, (kind, x, g) in parts.items()}


def _gram(kind: str, x: Tensor, g: Tensor) -> Tensor:
    """The squared norm of each row's gradient, from products of its positions."""
    pairs = g @ g.mT
    if kind == "linear":
        wide = x.to(g.dtype)
        return (pairs * (wide @ wide.mT)).sum((1, 2))
    return (pairs * (x.unsqueeze(1) == x.unsqueeze(2))).sum((1, 2))


def _sum(kind: str, x: Tensor, g: Tensor, leaf: Tensor) -> Tensor:
    """The gradient by a weight, of inputs and gradients of outputs ``(positions, width)``."""
    if kind == "linear":
        return g.mT @ x.to(g.dtype)
    return torch.zeros(leaf.shape, dtype=g.dtype, device=g.device).index_add(0, x, g)


def sample_gradients(
    loss: Row, leaves: Flat, paths: Sequence[str], rows: list[Tensor], calls: Sequence[LayerCall]
) -> SampleGradients | None:
    """The gradients of rows by some leaves; None if the rows call other layers than the first row did.

    Args:
        loss: of one row.
        leaves: all leaves.
        paths: the leaves by which to differentiate.
        rows: tensors, ``(rows, ...)``.
        calls: the calls of layers whose weights nothing else reads.
    """
    ghosts = {call.path: leaves[call.path] for call in calls}
    seen: list[list[LayerCall]] = []

    def one(held: Flat, probes: list[Tensor], row: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with exact(), CaughtLayers(ghosts, probes) as mode:
            value = loss({**leaves, **held}, row)
        seen.append(mode.calls)
        return value, mode.inputs

    held = {path: leaves[path] for path in paths if path not in ghosts}
    probes = [leaves[call.path].new_zeros(call.shape) for call in calls]
    try:
        slopes: Any = torch.func.grad(one, argnums=(0, 1), has_aux=True)
        found: Any = torch.vmap(slopes, (None, None, 0))(held, probes, rows)
    except IndexError:
        if calls:
            return None
        raise
    if calls and seen[-1] != list(calls):
        return None
    (grads, by_probe), inputs = found
    return SampleGradients(grads, list(zip(calls, inputs, by_probe, strict=True)))
