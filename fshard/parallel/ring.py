"""Ring attention: attention over a sequence that is cut over ranks (Liu, Zaharia, Abbeel 2023).

Keys and values travel round the ring, and each rank attends with its own queries to those that it holds; the logsumexp
of the parts joins them into one softmax. The backward sends keys and values round once more together with their
gradients, which are complete when they have passed every rank. No rank ever holds the keys and values of more than two
ranks, and between forward and backward it keeps only its own.

With ``causal`` the sequence is cut by ``zigzag``. A rank then needs its own part below the diagonal, and half of each
other rank's part, either of the queries or of the keys: equal work for all in each step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.collectives import raw
from fshard.collectives.linear import Permute
from fshard.collectives.make_linear import untraced
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import resolve
from fshard.errors import PlanError, TransformError
from fshard.parallel.attention import attend, attend_backward
from fshard.parallel.plan_checks import check_data_axis
from fshard.sharding.mesh import Mesh


@untraced
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: str = "cp",
    causal: bool = True,
    scale: float | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` over the sequence of all ranks along an axis.

    Differentiable once, by torch.autograd and ``torch.func.grad``. It has no forward mode and no vmap rule.

    Args:
        q: (batch, heads, time / ranks, width): this rank's queries.
        k: (batch, kv heads, time / ranks, width): its keys; ``heads`` is a multiple of ``kv heads``.
        v: as ``k``.
        axis: the context-parallel axis, a data axis of the step.
        causal: attend only to earlier tokens; the sequence must then be cut by ``zigzag``.
        scale: the factor on scores, ``width ** -0.5`` by default.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        As ``q``: each rank's own.

    Raises:
        PlanError: shapes that do not fit, an odd part of a causal sequence, or, in a step, an axis that is not a data
            axis.
        AxisError: no mesh is in scope, or it has no such axis.

    >>> import fshard as fs
    >>> from fshard.parallel import unzigzag, zigzag_slice
    >>> x, mesh = torch.randn(1, 2, 8, 4), fs.virtual_mesh((2,), ("cp",))
    >>> parts = mesh.run(lambda: ring_attention(*[zigzag_slice(x, 2, mesh=mesh)] * 3, mesh=mesh))
    >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(unzigzag(torch.cat(parts, 2), 2, 2), whole, atol=1e-5)
    True
    """
    group = resolve(axis, mesh)
    check_data_axis(axis, "ring_attention", mesh)
    _check(q, k, v, group, causal)
    ring = Ring(group, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    result: Tensor = Attention.apply(q, k, v, ring)[0]  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class Ring:
    """The settings of one call of ring attention."""

    group: Ranks
    causal: bool
    scale: float

    def send(self, x: Tensor) -> raw.Finish:
        """Start to send to the next rank; the result comes from the rank before."""
        size = self.group.size
        return Permute(self.group, tuple((i, (i + 1) % size) for i in range(size))).begin(x)

    def part(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """The part of one step of the ring: queries, keys, and whether only below the diagonal."""
        everything, half = slice(None), length // 2
        source = (self.group.index - step) % self.group.size
        if not self.causal or source == self.group.index:
            return everything, everything, self.causal
        # An earlier rank's early chunk of keys precedes all queries here, and its late chunk follows them. Both chunks
        # of a later rank lie between the two chunks of queries here.
        return (everything, slice(half), False) if source < self.group.index else (slice(half, None), everything, False)

    def turn(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The keys and values of all ranks, this one's first; those of the next step travel meanwhile."""
        for step in range(self.group.size):
            arriving = self.send(kv) if step + 1 < self.group.size else None
            yield step, kv
            kv = arriving() if arriving is not None else kv


class Attention(torch.autograd.Function):
    """Attention round the ring: (output, logsumexp)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        total, sums = q.new_empty(0), q.new_empty(0)
        for step, kv in ring.turn(torch.stack((k, v))):
            rows, columns, causal = ring.part(step, q.shape[2])
            out, lse = attend(q[:, :, rows], kv[0][:, :, columns], kv[1][:, :, columns], causal, ring.scale)
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
        q, k, v, ctx.ring = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Another function, which gets data under transforms, too."""
        dq, dk, dv = RingGradients.apply(grad, *ctx.saved_tensors, ctx.ring)  # type: ignore[no-untyped-call]
        return dq, dk, dv, None


class RingGradients(torch.autograd.Function):
    """The gradients of queries, keys and values."""

    @staticmethod
    def forward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ring: Ring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The ring once more, with gradients of keys and values one step behind."""
        dq = torch.zeros_like(q, dtype=sums.dtype)
        flying: raw.Finish | None = None
        for step, kv in ring.turn(torch.stack((k, v))):
            rows, columns, causal = ring.part(step, q.shape[2])
            mine = [x[:, :, rows] for x in (grad, q, out, sums)]
            parts = attend_backward(mine, kv[0][:, :, columns], kv[1][:, :, columns], causal, ring.scale)
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


def _check(q: Tensor, k: Tensor, v: Tensor, group: Ranks, causal: bool) -> None:
    expect("ring_attention(q, k, v)", [(n, x, Tensor, "a tensor") for n, x in (("q", q), ("k", k), ("v", v))])
    fits = q.dim() == 4 and k.shape == v.shape and k.dim() == 4 and q.shape[1] % k.shape[1] == 0
    if not fits or (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        raise PlanError(
            f"ring_attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be (batch, heads, time, "
            f"width) of equal batch, time and width, and the heads of q a multiple of those of k and v"
        )
    if causal and group.size > 1 and q.shape[2] % 2:
        whole = q.shape[2] * group.size
        raise PlanError(
            f"ring_attention: {q.shape[2]} tokens a rank on {group.size} ranks of axis {str(group)!r}: a causal "
            f"sequence of {whole} is cut into 2 * {group.size} equal chunks, two a rank, so it must be a multiple of "
            f"{2 * group.size}; pad it to {whole + group.size}"
        )
