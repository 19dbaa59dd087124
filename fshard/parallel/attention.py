"""Attention on one rank, with the logarithmic sums of its scores: what parts of a softmax are put together from.

Where PyTorch has a fused kernel that gives these sums, it is used: on CPUs. Elsewhere scores are made and dropped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and for each query the logarithm of the sum of its scores' exponentials.

    Args:
        q: (batch, heads, queries, width).
        k: (batch, kv heads, keys, width); each serves equally many neighbouring heads.
        v: as ``k``.
        causal: attend to keys that do not lie behind the query; as many queries as keys.
        scale: what scores are multiplied by.

    Returns:
        The result, as ``q``, and (batch, heads, queries) in float32 or better.
    """
    k, v = _for_heads(q, k), _for_heads(q, v)
    if q.device.type != "cpu":
        return by_scores(q, k, v, causal, scale)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(*map(_in_rows, (q, k, v)), 0.0, causal, scale=scale)
    return out, lse


def by_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` in plain operators; as many heads in all of them."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def attend_backward(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of the gradients of queries, keys and values that come from these keys.

    With ``out`` and ``lse`` of all keys, the parts of all keys add up to the gradients (FlashAttention, Dao et al.
    2022).

    Args:
        queries: the gradient of ``out``, then ``q``, ``out`` and ``lse``.
        k: as for ``attend``, and so are the others.
        v: likewise.
        causal: likewise.
        scale: likewise.
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
    """``attend_backward`` in plain operators; as many heads in all of them."""
    grad, q, out, lse = queries
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = grad.to(weights.dtype)
    inner = wide @ v.to(weights.dtype).mT - (wide * out).sum(-1, keepdim=True)
    scores = weights * inner * scale
    return scores @ k.to(scores.dtype), scores.mT @ q.to(scores.dtype), weights.mT @ wide


def _for_heads(q: Tensor, x: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _in_rows(x: Tensor) -> Tensor:
    """With the elements of the last dim side by side, as the fused kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
