"""Embedding and cross-entropy over a vocabulary that an axis cuts (Megatron-LM).

No rank ever holds the logits of the whole vocabulary. Ranks exchange three numbers a token: the largest logit, the sum
of exponentials, and the logit of the target.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import collectives
from fshard.collectives.linear import is_fake
from fshard.collectives.make_linear import dim_of
from fshard.errors import PlanError
from fshard.parallel.plan_checks import check_cut
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import assert_async, functorch


def vocab_embedding(
    tokens: Tensor, weight: Tensor, *, axis: str = "tp", sequence_dim: int | None = None, mesh: Mesh | None = None
) -> Tensor:
    """The embeddings of tokens, from rows that are cut over ranks.

    Args:
        tokens: integers of any shape, the same on all ranks along the axis.
        weight: (vocabulary / ranks, width), this rank's rows: a leaf under ``column_rule``.
        axis: the tensor-parallel axis.
        sequence_dim: the dim of ``tokens`` that cuts the result into slices, one a rank; None for the whole result.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        ``(*tokens.shape, width)``, the same on all ranks; with ``sequence_dim`` this rank's slice.

    Raises:
        PlanError: inside of a step, the plan does not cut the weight this way; or a token is not in the vocabulary.
        CollectiveError: ``tokens`` have no ``sequence_dim``, or the axis does not divide it.

    >>> one = fs.make_mesh((1,), ("tp",))
    >>> fs.parallel.vocab_embedding(torch.tensor([2, 0]), torch.eye(3), mesh=one)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    check_cut(weight, axis, 0, "vocab_embedding", "fs.parallel.column_rule")
    rows, parts = weight.shape[0], collectives.axis_size(axis, mesh=mesh)
    check_ids(tokens, rows * parts, None, "vocab_embedding")
    local = tokens - rows * collectives.axis_index(axis, mesh=mesh)
    here = (local >= 0) & (local < rows)
    found = F.embedding(torch.where(here, local, 0), weight) * here.unsqueeze(-1)
    if sequence_dim is None:
        return collectives.psum(found, axis, mesh=mesh)  # type: ignore[no-any-return]
    dim = dim_of(tokens, sequence_dim, "vocab_embedding, sequence_dim") - 1  # from the end; there is one more
    return collectives.psum_scatter(found, axis, dim=dim, tiled=True, mesh=mesh)  # type: ignore[no-any-return]


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    axis: str = "tp",
    vocab: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    mesh: Mesh | None = None,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits that are cut over ranks.

    Args:
        logits: (..., vocabulary / ranks), this rank's columns, such as the result of ``column_linear`` with the
            embedding.
        target: integers (...), the same on all ranks along the axis.
        axis: the tensor-parallel axis.
        vocab: the number of classes, if it is smaller than the number of columns: a vocabulary that the axis does not
            divide is padded to ``padded(vocab, ranks)`` rows, and columns after the last class are ignored.
        ignore_index: targets with this value have loss 0 and do not count in the mean.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for losses of the shape of ``target``.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        The loss in float32 (float64 for float64), the same on all ranks. With targets of unequal counts on different
        ranks, return ``fs.Mean`` of the sum and the count.

    Raises:
        PlanError: shapes that do not fit, a target outside of the vocabulary, an unknown reduction.

    >>> one = fs.make_mesh((1,), ("tp",))
    >>> fs.parallel.vocab_cross_entropy(torch.zeros(5, 4), torch.tensor([0, 1, 2, 3, 0]), mesh=one)  # log(4)
    tensor(1.3863)
    """
    if reduction not in ("mean", "sum", "none"):
        raise PlanError(f"vocab_cross_entropy: reduction={reduction!r} is none of 'mean', 'sum' and 'none'")
    if logits.shape[:-1] != target.shape:
        raise PlanError(
            f"vocab_cross_entropy: logits {list(logits.shape)} need targets {list(logits.shape[:-1])}, and got "
            f"{list(target.shape)}"
        )
    width, parts = logits.shape[-1], collectives.axis_size(axis, mesh=mesh)
    if vocab is not None and not 0 < vocab <= width * parts:
        raise PlanError(
            f"vocab_cross_entropy: vocab={vocab}, but {parts} ranks of {axis!r} with {width} columns each have "
            f"{width * parts}: pad the embedding to fs.parallel.padded({vocab}, {parts}) = {padded(vocab, parts)} rows"
        )
    vocab = width * parts if vocab is None else vocab
    check_ids(target, vocab, ignore_index, "vocab_cross_entropy")
    first = width * collectives.axis_index(axis, mesh=mesh)
    losses = _losses(logits, target - first, vocab - first, axis, mesh)
    counted = target != ignore_index
    losses = torch.where(counted, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def padded(vocab: int, parts: int) -> int:
    """The smallest multiple of ``parts`` that holds a vocabulary.

    Args:
        vocab: the number of tokens.
        parts: the ranks along the tensor-parallel axis.

    >>> fs.parallel.padded(50257, 4)
    50260
    """
    return -(-vocab // parts) * parts


def _losses(logits: Tensor, local: Tensor, classes: int, axis: str, mesh: Mesh | None) -> Tensor:
    """The loss of each target; ``local`` and ``classes`` count from this rank's first column."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if classes < logits.shape[-1]:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= classes
        logits = logits.masked_fill(beyond, -torch.inf)
    top = collectives.pmax(logits.detach().amax(-1), axis, mesh=mesh)
    here = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, torch.where(here, local, 0).unsqueeze(-1)).squeeze(-1)
    picked = torch.where(here, picked - top, torch.zeros_like(picked))
    sums = torch.stack(((logits - top.unsqueeze(-1)).exp().sum(-1), picked))
    total, mine = collectives.psum(sums, axis, mesh=mesh).unbind(0)
    return total.log() - mine  # type: ignore[no-any-return]


def check_ids(ids: Tensor, count: int, ignored: int | None, what: str) -> None:
    """Refuse numbers outside of the vocabulary; on a GPU by an assertion there, without a host sync."""
    if is_fake(ids) or functorch.is_functorch_wrapped_tensor(ids):
        return
    wrong = (ids < 0) | (ids >= count)
    if ignored is not None:
        wrong &= ids != ignored
    if ids.device.type != "cpu":
        assert_async(~wrong.any())
    elif wrong.any():
        raise PlanError(
            f"{what}: {int(wrong.sum())} of {ids.numel()} numbers, the first {int(ids[wrong][0])}, are not in a "
            f"vocabulary of {count}: give numbers from 0 to {count - 1}"
        )
