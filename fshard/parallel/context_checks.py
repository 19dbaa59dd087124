"""Checks of what is given to attention over a sequence that is cut over ranks, before it communicates."""

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.collectives.ranks import Ranks
from fshard.errors import PlanError


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
