"""Attention on one rank, with the logsumexp of its scores, which joins the parts of a softmax.

On CPUs a fused kernel of PyTorch returns these sums. Elsewhere the scores are computed in full.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores, (batch, heads, queries) in float32 or better.

    ``q`` is (batch, heads, queries, width), ``k`` and ``v`` are (batch, kv heads, keys, width): each kv head serves
    equally many neighbouring heads. ``causal`` queries, as many as keys, attend only to keys up to their position.
    """
    k, v = _for_heads(q, k), _for_heads(q, v)
    if q.device.type != "cpu":
        return by_scores(q, k, v, causal, scale)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(*map(_in_rows, (q, k, v)), 0.0, causal, scale=scale)
    return out, lse


def by_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` in plain operators, with equally many heads in all arguments."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def attend_backward(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' parts of the gradients of queries, keys and values.

    ``queries`` are the gradient of ``out``, then ``q``, ``out`` and ``lse``, the latter two over all keys; the other
    arguments are those of ``attend``. The parts of all keys add up to the gradients (FlashAttention, Dao et al. 2022).
    """
    grad, q, out, lse = queries
    shared = (k.shape[1], q.shape[1] // k.shape[1])
    k, v = _for_heads(q, k), _for_heads(q, v)
    if q.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = fused(*map(_in_rows, (grad, q, k, v, out)), lse, 0.0, causal, scale=scale)
    else:
        dq, dk, dv = backward_by_scores(queries, k, v, causal, scale)
    return dq, dk.unflatten(1, shared).sum(2), dv.unflatten(1, shared).sum(2)


def backward_by_scores(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` in plain operators, with equally many heads in all arguments."""
    grad, q, out, lse = queries
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = grad.to(weights.dtype)
    inner = wide @ v.to(weights.dtype).mT - (wide * out).sum(-1, keepdim=True)
    scores = weights * inner * scale
    return scores @ k.to(scores.dtype), scores.mT @ q.to(scores.dtype), weights.mT @ wide


def _for_heads(q: Tensor, x: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _in_rows(x: Tensor) -> Tensor:
    """Contiguous along the last dim, as the fused kernels assume."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
