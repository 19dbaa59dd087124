"""Kernels of attention that return the logsumexp of each query's scores, and their backwards.

A backward takes the output and the logsumexp over *all* keys, and returns one block of keys' parts of the gradients.
So blocks of keys can be computed one after the other, on one rank or on several (FlashAttention, Dao et al. 2022).

=============== ================== ===================================== ============== ================
kernel          device             dtypes                                masks          heads
=============== ================== ===================================== ============== ================
``CPU_FLASH``   CPU                all floating-point ones               yes            may be shared
``CUDA_FLASH``  CUDA               float16, bfloat16                     causal alone   may be shared
``EFFICIENT``   CUDA               float16, bfloat16, float32            yes            are repeated
``SCORES``      any                all                                   yes            are repeated
=============== ================== ===================================== ============== ================

The first that fits is used. PyTorch's switches hold here, too: under ``sdpa_kernel(SDPBackend.MATH)`` it is ``SCORES``,
plain operators, whose scores are a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F  # noqa: N812

from fshard.torch_internals import DisableAutocast, sdp_flash

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[[tuple[Tensor, ...], Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]]

ALIGNED = 16
"""Rows of a mask of ``EFFICIENT`` begin at multiples of so many elements."""
LSE_BLOCK = 32
"""Rows of its logsumexp are padded to a multiple of this, with infinity."""


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel: ``forward(q, k, v, bias, causal, scale)`` and ``backward((grad, q, k, v, out, lse), bias, ...)``.

    Attributes:
        name: for tests and errors.
        forward: gives the output, as ``q``, and the logsumexp, (batch, heads, queries), in float32 or float64.
        backward: gives the gradients of ``q``, ``k`` and ``v``.
        masks: whether it takes a bias, which is added to scores: (batch or 1, 1, queries, keys) in the dtype of ``q``.
        whole: whether it holds all scores at once, so that its queries must come in tiles.
    """

    name: str
    forward: Forward
    backward: Backward
    masks: bool = True
    whole: bool = False


def kernel_for(q: Tensor, k: Tensor, v: Tensor, causal: bool, masked: bool) -> AttentionKernel:
    """The first kernel of the table that fits."""
    if q.device.type in ("cpu", "meta") and sdp_flash():  # without data the shapes of any fused kernel will do
        return CPU_FLASH
    if q.device.type != "cuda":
        return SCORES
    if not masked and q.shape[-1] % 8 == 0:
        if cuda.can_use_flash_attention(cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])):
            return CUDA_FLASH
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    if cuda.can_use_efficient_attention(cuda.SDPAParams(q, k, v, None, 0.0, causal, False)):
        return EFFICIENT
    return SCORES


def _cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(*map(_in_rows, (q, k, v)), 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _cpu_flash_backward(
    given: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = fused(*map(_in_rows, given[:5]), given[5], 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def _cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    assert bias is None
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = fused(*map(_in_rows, (q, k, v)), 0.0, causal, False, scale=scale)[:2]
    return out, lse


def _cuda_flash_backward(
    given: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert bias is None
    fused, q, k = torch.ops.aten._scaled_dot_product_flash_attention_backward, given[1], given[2]
    state = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # of dropout, which is not used
    sizes = (None, None, q.shape[2], k.shape[2])
    rows, lse = map(_in_rows, given[:5]), given[5].contiguous()
    dq, dk, dv = fused(*rows, lse, *sizes, 0.0, causal, *state, scale=scale)
    return dq, dk, dv


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    k, v = for_heads(q, k), for_heads(q, v)
    bias = None if bias is None else _aligned(bias, q)
    out, lse = fused(*map(_in_rows, (q, k, v)), bias, True, 0.0, causal, scale=scale)[:2]
    return out, lse.narrow(-1, 0, q.shape[2])


def _efficient_backward(
    given: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    grad, q, k, v, out, lse = given
    rows = map(_in_rows, (grad, q, for_heads(q, k), for_heads(q, v)))
    padded = F.pad(lse, (0, -lse.shape[-1] % LSE_BLOCK), value=torch.inf).contiguous()
    unused = q.new_empty((), dtype=torch.int64)  # as the state of dropout
    bias = None if bias is None else _aligned(bias, q)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = fused(*rows, bias, _in_rows(out), padded, unused, unused, 0.0, wanted, causal, scale=scale)
    return dq, _shared(dk, k), _shared(dv, v)


def _scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with DisableAutocast():  # scores are at least float32
        scores = _products(q, for_heads(q, k), bias, causal, scale)
        lse = scores.logsumexp(-1)
        # A query that sees no key has weights 0, and not nan.
        weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
        return (weights @ for_heads(q, v).to(scores.dtype)).to(q.dtype), lse


def _scores_backward(
    given: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = given
    keys, values = for_heads(q, k), for_heads(q, v)
    with DisableAutocast():
        weights = (_products(q, keys, bias, causal, scale) - lse.unsqueeze(-1)).exp()
        wide = grad.to(weights.dtype)
        inner = wide @ values.to(weights.dtype).mT - (wide * out).sum(-1, keepdim=True)
        scores = weights * inner * scale
        dk, dv = scores.mT @ q.to(scores.dtype), weights.mT @ wide
        return scores @ keys.to(scores.dtype), _shared(dk, k), _shared(dv, v)


def for_heads(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated so that each head of ``q`` has its own."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _shared(grad: Tensor, x: Tensor) -> Tensor:
    """The adjoint of ``for_heads``."""
    batch, heads, *rest = x.shape
    return grad if grad.shape[1] == heads else grad.reshape(batch, heads, grad.shape[1] // heads, *rest).sum(2)


def _in_rows(x: Tensor) -> Tensor:
    """Contiguous along the last dim, as the fused kernels assume."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(bias: Tensor, q: Tensor) -> Tensor:
    """A bias for all heads of ``q`` whose rows begin at aligned addresses."""
    keys = bias.shape[-1]
    padded = F.pad(bias, (0, -keys % ALIGNED)).narrow(-1, 0, keys)
    return padded.expand(*q.shape[:2], -1, -1)


def _products(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if bias is not None:
        scores = scores + bias
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


CPU_FLASH = AttentionKernel("flash attention for CPUs", _cpu_flash, _cpu_flash_backward)
CUDA_FLASH = AttentionKernel("flash attention", _cuda_flash, _cuda_flash_backward, masks=False)
EFFICIENT = AttentionKernel("memory-efficient attention", _efficient, _efficient_backward)
SCORES = AttentionKernel("plain operators", _scores, _scores_backward, whole=True)
