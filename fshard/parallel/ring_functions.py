"""Ring attention and its gradients as autograd functions.

Both compute in fused kernels where these fit. Their own derivatives, which are second derivatives and forward ones, are
plain operators on gathered keys and values.

Gradients are the first derivatives of one number, the sum over ranks of the products of outputs and their cotangents.
Its second derivatives are symmetric, so one function serves both orders of differentiation: the forward derivative of
the gradients is also their adjoint. Scores of a rank's queries and all keys are held as a whole. All operators of these
derivatives are differentiable, so higher ones follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard.collectives import raw
from fshard.collectives.linear import Gather, Scatter, apply
from fshard.parallel.attention import Ring, attend, attend_backward, visible
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


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
    """Attention round the ring, differentiable. Values may be narrower or wider than keys: zeros fill up the others."""
    width, most = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    result: Tensor = Attention.apply(q, k, v, documents, ring)[0]  # type: ignore[no-untyped-call]
    return result if width == most else result.narrow(-1, 0, width)


class Attention(torch.autograd.Function):
    """Attention round the ring: (output, logsumexp)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
        total, sums = q.new_empty(0), q.new_empty(0)
        for step, kv in ring.turn(torch.stack((k, v))):
            part = ring.part(step, q.shape[2])
            rows, columns, _ = part
            seen = ring.seen(step, part, documents)
            out, lse = attend(q[:, :, rows], kv[0][:, :, columns], kv[1][:, :, columns], seen, ring.scale)
            if step == 0:
                total, sums = out.to(lse.dtype), lse
            else:
                mine = sums[:, :, rows]
                both = torch.logaddexp(mine, lse)
                old, new = (mine - both).exp().unsqueeze(-1), (lse - both).exp().unsqueeze(-1)
                total[:, :, rows] = total[:, :, rows] * old + out * new
                sums[:, :, rows] = both
        return total.to(q.dtype), sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, documents, ctx.ring = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, documents)
        ctx.save_for_forward(q, k, v, *output, documents)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Another function, which gets data under transforms, too."""
        dq, dk, dv = RingGradients.apply(grad, *ctx.saved_tensors, ctx.ring)  # type: ignore[no-untyped-call]
        return dq, dk, dv, None, None

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: None) -> tuple[Tensor, None]:
        """In plain operators."""
        q, k, v, _, _, documents = ctx.saved_tensors
        at = q, k, v
        return output_tangent(at, along_of(at, (dq, dk, dv)), documents, ctx.ring), None


class RingGradients(torch.autograd.Function):
    """The gradients of queries, keys and values."""

    @staticmethod
    def forward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        documents: Tensor | None,
        ring: Ring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The ring once more, with gradients of keys and values one step behind."""
        dq = torch.zeros_like(q, dtype=sums.dtype)
        flying: raw.Finish | None = None
        for step, kv in ring.turn(torch.stack((k, v))):
            part = ring.part(step, q.shape[2])
            rows, columns, _ = part
            seen = ring.seen(step, part, documents)
            mine = (grad[:, :, rows], q[:, :, rows], out[:, :, rows], sums[:, :, rows])
            parts = attend_backward(mine, kv[0][:, :, columns], kv[1][:, :, columns], seen, ring.scale)
            dq[:, :, rows] += parts[0]
            dkv = torch.zeros_like(kv, dtype=sums.dtype) if flying is None else flying()
            dkv[0][:, :, columns] += parts[1]
            dkv[1][:, :, columns] += parts[2]
            flying = ring.send(dkv)
        assert flying is not None
        dk, dv = flying()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad, q, k, v, _, _, documents, ctx.ring = inputs
        ctx.save_for_backward(grad, q, k, v, documents)
        ctx.save_for_forward(grad, q, k, v, documents)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        """The adjoint: second derivatives are symmetric, and the gradients are linear in the cotangent."""
        grad, q, k, v, documents = ctx.saved_tensors
        at, along = (q, k, v), (dq, dk, dv)
        output = output_tangent(at, along, documents, ctx.ring)
        return output, *gradients_tangent((grad, None), at, along, documents, ctx.ring), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, moved: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> Heads:
        """In plain operators; the output and its sums follow from queries, keys and values."""
        grad, q, k, v, documents = ctx.saved_tensors
        at = q, k, v
        return gradients_tangent((grad, moved), at, along_of(at, (dq, dk, dv)), documents, ctx.ring)


def along_of(at: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Heads:
    """Tangents, with zeros for those that are missing."""
    dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in zip(at, tangents, strict=True))
    return dq, dk, dv
