"""The steps of ring attention, forward and backward, on the data of one rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.linear import Permute
from fshard.collectives.ranks import Ranks
from fshard.errors import TransformError
from fshard.parallel.attention import AttentionMask, attend, attend_backward

Part = tuple[slice, slice, bool]
"""The part of one step of the ring: queries, keys, and whether only below the diagonal."""


@dataclass(frozen=True)
class Ring:
    """The settings of one call of ring attention; without a group, of attention on one rank."""

    group: Ranks | None
    causal: bool
    scale: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size if self.group is not None else 1

    @property
    def index(self) -> int:
        """The place of this rank."""
        return self.group.index if self.group is not None else 0

    def send(self, x: Tensor) -> raw.Finish:
        """Start to send to the next rank; the result comes from the rank before."""
        size = self.size
        if self.group is None or size == 1:
            return lambda: x
        return Permute(self.group, tuple((i, (i + 1) % size) for i in range(size))).begin(x)

    def source(self, step: int) -> int:
        """The rank whose keys are here in a step."""
        return (self.index - step) % self.size

    def part(self, step: int, length: int) -> Part:
        """The part that this rank computes in a step."""
        everything, half = slice(None), length // 2
        source = self.source(step)
        if not self.causal or source == self.index:
            return everything, everything, self.causal
        # An earlier rank's early chunk of keys precedes all queries here, and its late chunk follows them. Both chunks
        # of a later rank lie between the two chunks of queries here.
        return (everything, slice(half), False) if source < self.index else (slice(half, None), everything, False)

    def seen(self, step: int, part: Part, documents: Tensor | None) -> AttentionMask:
        """The mask of a part. ``documents`` are those of all ranks' tokens, (batch, ranks, time)."""
        rows, columns, causal = part
        if documents is None:
            return AttentionMask(causal)
        return AttentionMask(causal, documents[:, self.index, rows], documents[:, self.source(step), columns])

    def turn(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The keys and values of all ranks, this one's first; those of the next step travel meanwhile."""
        for step in range(self.size):
            arriving = self.send(kv) if step + 1 < self.size else None
            yield step, kv
            kv = arriving() if arriving is not None else kv


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
    """Attention round the ring, differentiable."""
    result: Tensor = Attention.apply(q, k, v, documents, ring)[0]  # type: ignore[no-untyped-call]
    return result


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

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Another function, which gets data under transforms, too."""
        dq, dk, dv = RingGradients.apply(grad, *ctx.saved_tensors, ctx.ring)  # type: ignore[no-untyped-call]
        return dq, dk, dv, None, None


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
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse."""
        raise TransformError(
            "ring_attention is differentiable once: for second derivatives gather keys and values by "
            "fs.collectives.all_gather, and call scaled_dot_product_attention"
        )
