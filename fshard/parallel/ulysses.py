"""Ulysses attention: ranks trade their parts of the sequence for heads (Jacobs et al. 2023), in a ring or alone.

An all-to-all gives each rank the whole sequence of some heads, and another one gives results back. Heads limit the
number of ranks. With ``ring`` the whole sequence is that of one place in the ring, so ranks multiply (USP: Fang and
Zhao 2024).

A sequence is cut by ``zigzag`` over all ranks, the axis of the ring first. The chunks of one place in the ring are then
neighbours: together they are its early and its late chunk, as the ring alone would cut them.
"""

import math

import torch
from torch import Tensor

from fshard import collectives
from fshard.arguments import expect
from fshard.collectives.make_linear import untraced
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import resolve
from fshard.errors import PlanError
from fshard.parallel.attention import Ring
from fshard.parallel.plan_checks import check_data_axis, divided
from fshard.parallel.ring_functions import attention
from fshard.parallel.zigzag import unzigzag, zigzag
from fshard.sharding.mesh import Mesh


def check_heads(call: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes do not fit each other."""
    expect(f"{call}(q, k, v)", [(n, x, Tensor, "a tensor") for n, x in (("q", q), ("k", k), ("v", v))])
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3]
    fits = fits and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not fits or (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        raise PlanError(
            f"{call}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be (batch, heads, time, width) "
            f"of equal batch and time, q and k of equal width, and the heads of q a multiple of those of k and v"
        )


def check_cut(call: str, q: Tensor, group: Ranks, causal: bool) -> None:
    """Refuse a causal sequence that cannot be cut into two chunks a rank."""
    if causal and group.size > 1 and q.shape[2] % 2:
        whole = q.shape[2] * group.size
        raise PlanError(
            f"{call}: {q.shape[2]} tokens a rank on {group.size} ranks of axis {str(group)!r}: a causal sequence of "
            f"{whole} is cut into 2 * {group.size} equal chunks, two a rank, so it must be a multiple of "
            f"{2 * group.size}; pad it to {whole + group.size}"
        )


def check_documents(call: str, q: Tensor, documents: Tensor | None) -> None:
    """Refuse numbers of documents that are not one integer for each of this rank's tokens."""
    if documents is None:
        return
    expect(f"{call}(documents=)", [("documents", documents, Tensor, "the number of each token's document")])
    if documents.is_floating_point() or documents.is_complex() or documents.dtype == torch.bool:
        what = "a mask (batch, 1, queries, keys) is not taken" if documents.dtype == torch.bool else "give int64"
        raise PlanError(
            f"{call}: documents are {documents.dtype}, not the integer number of each token's document: {what}"
        )
    if documents.shape != (q.shape[0], q.shape[2]):
        raise PlanError(
            f"{call}: documents {list(documents.shape)} of {q.shape[0]} rows of {q.shape[2]} tokens on this rank must "
            f"be {[q.shape[0], q.shape[2]]}: cut them as the tokens are, by zigzag_slice(documents)"
        )


CALL = "ulysses_attention"


@untraced
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: str = "cp",
    ring: str | None = None,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """``ring_attention`` by heads: the same arguments, the same result, and the same cut of the sequence.

    A rank sends its queries, keys, values and results once, in four all-to-alls; in a ring its keys and values pass
    every rank. Kv heads are repeated until the axis divides them.

    Args:
        q: (batch, heads, time / ranks, width): this rank's queries. The axis divides ``heads``.
        k: (batch, kv heads, time / ranks, width): its keys; ``heads`` is a multiple of ``kv heads``.
        v: as ``k``, of any width.
        axis: the axis whose ranks share the heads, a data axis of the step.
        ring: another data axis, for a ring of such groups of ranks. The sequence is then cut over both:
            ``zigzag_slice(x, axis=(ring, axis))``, and ``batch=P("data", (ring, axis))``.
        causal: attend only to earlier tokens; the sequence must then be cut by ``zigzag``.
        scale: the factor on scores, ``width ** -0.5`` by default.
        documents: (batch, time / ranks), integers, as for ``ring_attention``.
        mesh: where to look the axes up, if not on the mesh in scope.

    Returns:
        As ``q``, as wide as ``v``: each rank's own.

    Raises:
        PlanError: heads that the axis does not divide; what ``ring_attention`` refuses.
        AxisError: no mesh is in scope, or it has no such axis, or both axes are one.

    >>> x, mesh = torch.randn(1, 2, 8, 4), fs.virtual_mesh((2,), ("cp",))
    >>> own = lambda: fs.parallel.zigzag_slice(x, 2, mesh=mesh)
    >>> parts = mesh.run(lambda: fs.parallel.ulysses_attention(own(), own(), own(), mesh=mesh))
    >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(fs.parallel.unzigzag(torch.cat(parts, 2), 2, 2), whole, atol=1e-5)
    True
    """
    axes = (axis,) if ring is None else (ring, axis)
    everyone = resolve(axes, mesh)
    for each in axes:
        check_data_axis(each, CALL, mesh)
    check_heads(CALL, q, k, v)
    check_cut(CALL, q, everyone, causal)
    check_documents(CALL, q, documents)
    parts = q.shape[1] // divided(q.shape[1], axis, f"heads in {CALL}", mesh)
    k, v = (_enough(x, parts) for x in (k, v))
    q, k, v = (collectives.all_to_all(x, axis, 1, 2, tiled=True, mesh=mesh) for x in (q, k, v))
    if documents is not None:
        documents = collectives.all_gather(documents, axis, dim=1, tiled=True, mesh=mesh)
    dealt = causal and parts > 1
    if dealt:
        q, k, v = (unzigzag(x, parts, 2) for x in (q, k, v))
        documents = None if documents is None else unzigzag(documents, parts, 1)
    if documents is not None:
        documents = (
            documents.unsqueeze(1) if ring is None else collectives.all_gather(documents, ring, dim=1, mesh=mesh)
        )
    settings = Ring(
        None if ring is None else resolve(ring, mesh), causal, q.shape[-1] ** -0.5 if scale is None else scale
    )
    out = attention(q, k, v, documents, settings)
    out = zigzag(out, parts, 2) if dealt else out
    back: Tensor = collectives.all_to_all(out, axis, 2, 1, tiled=True, mesh=mesh)
    return back


def _enough(x: Tensor, parts: int) -> Tensor:
    """Kv heads repeated until the ranks divide them: as many as queries share them, they stay in step with these."""
    return x.repeat_interleave(math.lcm(x.shape[1], parts) // x.shape[1], 1)
