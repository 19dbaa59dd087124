"""Ring attention and its gradients as autograd functions.

Both compute in fused kernels where these fit. Their own derivatives, which are second derivatives and forward ones, are
plain operators.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard.collectives import raw
from fshard.parallel.attention import Ring, attend, attend_backward
from fshard.parallel.attention_tangents import Heads, gradients_tangent, output_tangent


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
