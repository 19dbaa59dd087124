"""Ring attention: attention over a sequence that is cut over ranks (Liu, Zaharia, Abbeel 2023).

Keys and values travel round the ring, and each rank attends with its own queries to those that it holds; the logsumexp
of the parts joins them into one softmax. The backward sends keys and values round once more together with their
gradients, which are complete when they have passed every rank. No rank ever holds the keys and values of more than two
ranks, and between forward and backward it keeps only its own.

With ``causal`` the sequence is cut by ``zigzag``. A rank then needs its own part below the diagonal, and half of each
other rank's part, either of the queries or of the keys: equal work for all in each step.
"""

from torch import Tensor

from fshard import collectives
from fshard.collectives.make_linear import untraced
from fshard.collectives.scope import resolve
from fshard.parallel.attention import Ring
from fshard.parallel.plan_checks import check_data_axis
from fshard.parallel.ring_functions import attention
from fshard.parallel.ulysses import check_cut, check_documents, check_heads
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
    documents: Tensor | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` over the sequence of all ranks along an axis.

    Memory is linear in the tokens of a rank: a fused kernel computes each step where one fits, and plain operators
    take a tile of the queries at a time. Second and forward derivatives are plain operators, which hold the scores of a
    rank's queries and all keys. It has no vmap rule.

    Args:
        q: (batch, heads, time / ranks, width): this rank's queries.
        k: (batch, kv heads, time / ranks, width): its keys; ``heads`` is a multiple of ``kv heads``.
        v: as ``k``, of any width.
        axis: the context-parallel axis, a data axis of the step.
        causal: attend only to earlier tokens; the sequence must then be cut by ``zigzag``.
        scale: the factor on scores, ``width ** -0.5`` by default.
        documents: (batch, time / ranks), integers: the number of the document of each of this rank's tokens, cut as
            the tokens are. Tokens attend to their own document alone. ``fs.data.Packed`` gives such numbers, and
            ``document_ids`` makes them of lengths.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        As ``q``, as wide as ``v``: each rank's own.

    Raises:
        PlanError: shapes that do not fit, an odd part of a causal sequence, documents of another shape, or, in a
            step, an axis that is not a data axis.
        AxisError: no mesh is in scope, or it has no such axis.

    >>> x, mesh = torch.randn(1, 2, 8, 4), fs.virtual_mesh((2,), ("cp",))
    >>> own = lambda: fs.parallel.zigzag_slice(x, 2, mesh=mesh)
    >>> parts = mesh.run(lambda: fs.parallel.ring_attention(own(), own(), own(), mesh=mesh))
    >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(fs.parallel.unzigzag(torch.cat(parts, 2), 2, 2), whole, atol=1e-5)
    True
    """
    group = resolve(axis, mesh)
    check_data_axis(axis, "ring_attention", mesh)
    check_heads("ring_attention", q, k, v)
    check_cut("ring_attention", q, group, causal)
    check_documents("ring_attention", q, documents)
    if documents is not None:
        documents = collectives.all_gather(documents, axis, dim=1, mesh=mesh)
    return attention(q, k, v, documents, Ring(group, causal, q.shape[-1] ** -0.5 if scale is None else scale))
