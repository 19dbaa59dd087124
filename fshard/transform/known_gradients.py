"""Values whose gradients are known, as functions of the leaves that these are gradients by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.linear import LinearCollective, again
from fshard.transform.product_modes import Flat


class WithGradient(torch.autograd.Function):
    """A value as a function of leaves, of which its gradient is known."""

    @staticmethod
    def forward(value: Tensor, *given: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1 + len(inputs) // 2 :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [grad * slope for slope in ctx.saved_tensors]
        return grad, *slopes, *[None] * len(slopes)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """The tangent of the value, which has that of the leaves in it."""
        return tangent


def with_gradient(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A value as a function of leaves, each beside its part of the gradient."""
    leaves, slopes = zip(*pairs, strict=True)
    found: Tensor = WithGradient.apply(value, *leaves, *slopes)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class HessianMap(LinearCollective):
    """The Hessian of a loss times vectors of all leaves, one behind the other.

    Attributes:
        product: the product with one vector. Collective.
    """

    name = "fs.func.sharded_loss"
    product: Callable[[Tensor], Tensor]

    def start(self, x: Tensor) -> raw.Finish:
        found = torch.stack([self.product(row) for row in x.reshape(-1, x.shape[-1])])
        return lambda: found.view_as(x)

    def transpose(self) -> LinearCollective:
        """A Hessian is symmetric."""
        return self


class WithHessian(torch.autograd.Function):
    """A gradient as a function of the leaves that it is taken by."""

    @staticmethod
    def forward(gradient: Tensor, leaves: Tensor, hessian: HessianMap) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, HessianMap], output: Tensor) -> None:
        ctx.hessian = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, again(grad, ctx.hessian), None


def with_hessian(gradient: Mapping[str, Tensor], leaves: Flat, hessian: HessianMap) -> Flat:
    """The gradient by leaves as a function of them, whose derivative is this Hessian."""
    paths = [*leaves]
    found: Tensor = WithHessian.apply(  # type: ignore[no-untyped-call]
        as_vector([gradient[path] for path in paths]), as_vector([*leaves.values()]), hessian
    )
    return of_vector(found, leaves)


def as_vector(leaves: Sequence[Tensor]) -> Tensor:
    """Leaves as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def of_vector(vector: Tensor, like: Flat) -> Flat:
    """The leaves of a vector."""
    parts = torch.split(vector, [leaf.numel() for leaf in like.values()])
    return {path: part.view(leaf.shape).to(leaf.dtype) for part, (path, leaf) in zip(parts, like.items(), strict=True)}
