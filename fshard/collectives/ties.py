"""Make every rank run the adjoint of every collective, whatever each rank does with its result.

Ranks that branch by ``axis_index`` may use a collective's result on some ranks only, or pass it a constant on others.
Its adjoint is a collective too, and autograd runs it only where a result depends on an argument through it. So inside
of a differentiated ``shard_map``, every collective's input depends on the mapped function's arguments, and every result
depends on every collective's output, with derivatives of zero. Autograd runs the latest recorded node first, so
adjoints run in one order on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.collectives.linear import LinearCollective, apply, differentiable
from fshard.collectives.scope import SCOPE
from fshard.torch_internals import forward_ad_level, functorch


@dataclass(frozen=True)
class Ties:
    """The tensors that collectives inside of one call are tied to.

    Attributes:
        anchors: the floating arguments of the mapped function.
        depth: the number of transforms under way at the call.
        results: the outputs of its collectives.
    """

    anchors: tuple[Tensor, ...]
    depth: int
    results: list[Tensor] = field(default_factory=list)

    def tied(self, x: Any) -> Any:
        """A result of the mapped function, made to depend on all its collectives."""
        return _tie(x, len(self.anchors), (*self.anchors, *self.results)) if differentiable(x) else x


class Tie(torch.autograd.Function):
    """A tensor that depends on others, with derivatives of zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, zeros: int, *others: Tensor) -> Tensor:
        """The tensor. The first ``zeros`` of the others get gradients of zero."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, zeros, *others = inputs
        ctx.none = len(others) - zeros
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*others[:zeros])
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Nothing, or zeros: autograd visits nodes that get nothing, too."""
        return grad, None, *(torch.zeros_like(x) for x in ctx.saved_tensors), *(None,) * ctx.none

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, _: None, *others: Tensor | None) -> Tensor:
        return torch.zeros_like(ctx.saved_tensors[0]) if tangent is None else tangent.view_as(tangent)


def ties_of(args: Sequence[Any]) -> Ties | None:
    """The ties of a call with these arguments; None if none of them is differentiated."""
    anchors = tuple(x for x in args if differentiable(x) and _moved(x))
    return Ties(anchors, len(functorch.get_interpreter_stack() or ())) if anchors else None


def applied(x: Tensor, *ops: LinearCollective) -> Tensor:
    """Differentiable collectives in sequence, of a tensor of user code."""
    scope = SCOPE.get()
    ties: Ties | None = scope.ties if scope is not None else None
    if ties is None or not differentiable(x):
        for op in ops:
            x = apply(x, op)
        return x
    x = _tie(x, 0, ties.anchors)
    for op in ops:
        x = apply(x, op)
    if functorch.maybe_get_level(x) <= ties.depth:  # tensors of a transform inside do not outlive it
        ties.results.append(x)
    return x


def _tie(x: Tensor, zeros: int, others: Sequence[Tensor]) -> Tensor:
    tied: Tensor = Tie.apply(x, zeros, *others)  # type: ignore[no-untyped-call]
    return tied


def _moved(x: Tensor) -> bool:
    if functorch.is_functorch_wrapped_tensor(x) or (torch.is_grad_enabled() and x.requires_grad):
        return True
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return forward_ad_level() >= 0 and unpack(x).tangent is not None
