"""Forward derivatives of ring attention and of its gradients, in plain operators on gathered keys and values.

Gradients are the first derivatives of one number, the sum over ranks of the products of outputs and their cotangents.
Its second derivatives are symmetric, so one function serves both orders of differentiation: the forward derivative of
the gradients is also their adjoint. Scores of a rank's queries and all keys are held as a whole. All operators here are
differentiable, so higher derivatives follow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.collectives.linear import Gather, Scatter, apply
from fshard.parallel.attention import Ring, visible
from fshard.parallel.attention_kernels import for_heads
from fshard.torch_internals import DisableAutocast

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a rank, or their tangents."""


def output_tangent(at: Heads, along: Heads, documents: Tensor | None, ring: Ring) -> Tensor:
    """The tangent of the output."""
    with DisableAutocast():
        return Tangents.of(at, along, documents, ring).output().to(at[0].dtype)


def gradients_tangent(
    grads: tuple[Tensor, Tensor | None], at: Heads, along: Heads, documents: Tensor | None, ring: Ring
) -> Heads:
    """The tangents of the gradients of queries, keys and values.

    ``grads`` are the cotangent of the output, and its own tangent, None for zero.
    """
    with DisableAutocast():
        return _gradients_tangent(grads, at, Tangents.of(at, along, documents, ring), ring)


def _gradients_tangent(grads: tuple[Tensor, Tensor | None], at: Heads, found: "Tangents", ring: Ring) -> Heads:
    grad, moved = (None if x is None else x.to(found.weights.dtype) for x in grads)
    assert grad is not None
    q, k, v = found.at
    dq, dk, dv = found.along
    output = found.weights @ v
    inner = grad @ v.mT - (grad * output).sum(-1, keepdim=True)
    turned = grad @ dv.mT - (grad * found.output()).sum(-1, keepdim=True)
    if moved is not None:
        turned = turned + moved @ v.mT - (moved * output).sum(-1, keepdim=True)
    scores = found.weights * inner * ring.scale
    change = (found.change * inner + found.weights * turned) * ring.scale
    keys = change.mT @ q + scores.mT @ dq
    values = found.change.mT @ grad
    if moved is not None:
        values = values + found.weights.mT @ moved
    mine = (change @ k + scores @ dk, _own(keys, at[1], ring), _own(values, at[2], ring))
    return mine[0].to(at[0].dtype), mine[1].to(at[1].dtype), mine[2].to(at[2].dtype)


@dataclass(frozen=True)
class Tangents:
    """The weights of the softmax and their change.

    Attributes:
        at: queries of this rank, keys and values of all ranks, a head of each for each head of the queries.
        along: their tangents.
        weights: (batch, heads, queries, keys).
        change: the tangent of the weights.
    """

    at: Heads
    along: Heads
    weights: Tensor
    change: Tensor

    @classmethod
    def of(cls, at: Heads, along: Heads, documents: Tensor | None, ring: Ring) -> "Tangents":
        """With keys and values gathered."""
        wide = torch.promote_types(at[0].dtype, torch.float32)
        q, k, v = at[0].to(wide), *(_all(x.to(wide), at[0], ring) for x in at[1:])
        dq, dk, dv = along[0].to(wide), *(_all(x.to(wide), at[0], ring) for x in along[1:])
        scores = q @ k.mT * ring.scale
        mask = _mask(q.shape[2], documents, ring, q.device)
        weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
        moved = (dq @ k.mT + q @ dk.mT) * ring.scale
        change = weights * (moved - (weights * moved).sum(-1, keepdim=True))
        return cls((q, k, v), (dq, dk, dv), weights, change)

    def output(self) -> Tensor:
        """The tangent of the output."""
        return self.change @ self.at[2] + self.weights @ self.along[2]


def _all(x: Tensor, q: Tensor, ring: Ring) -> Tensor:
    """The keys or values of all ranks, one after the other, for each head of ``q``."""
    return for_heads(q, x if ring.group is None else apply(x, Gather(ring.group, -2)))


def _own(x: Tensor, like: Tensor, ring: Ring) -> Tensor:
    """The adjoint of ``_all``."""
    batch, heads = like.shape[:2]
    if x.shape[1] != heads:
        x = x.reshape(batch, heads, x.shape[1] // heads, *x.shape[2:]).sum(2)
    return x if ring.group is None else apply(x, Scatter(ring.group, -2))


def _mask(length: int, documents: Tensor | None, ring: Ring, device: torch.device) -> Tensor | None:
    """The keys of all ranks that this rank's queries see."""
    later = None
    if ring.causal:
        keys = _places(length, ring, device)
        later = keys > keys.view(ring.size, -1)[ring.index].unsqueeze(-1)
    if documents is None:
        return visible(None, None, later)
    return visible(documents[:, ring.index], documents.flatten(1), later)


def _places(length: int, ring: Ring, device: torch.device) -> Tensor:
    """The places in the whole sequence of all ranks' tokens."""
    if ring.size == 1:
        return torch.arange(length, device=device)
    half, chunks = length // 2, 2 * ring.size
    order = [at for i in range(ring.size) for at in (i, chunks - 1 - i)]
    return torch.cat([torch.arange(at * half, at * half + half, device=device) for at in order])
