"""``fs.chunked_cross_entropy``: a head and its cross-entropy by rows, with logits of one chunk at a time."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import collectives
from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.losses.head_rows import HeadLoss
from fshard.losses.one_pass import ChunkedHead
from fshard.parallel.plan_checks import check_cut
from fshard.parallel.vocab import check_ids, padded
from fshard.runtime.engine.mean import Mean
from fshard.sharding.mesh import Mesh

NAME = "chunked_cross_entropy"
REDUCTIONS = ("mean", "sum", "none", "parts")


def chunked_cross_entropy(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    labels: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    axis: str | None = None,
    vocab: int | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels)``, with the logits of one chunk of rows at a time.

    The gradients of hidden states and weights are computed with the loss, chunk by chunk, and the backward scales
    them. Under a transform of ``torch.func``, for second derivatives, in float16 and with ``reduction="none"`` each
    derivative computes the logits of a chunk again.

    Args:
        hidden: (..., width), floating. A sequence of several and as many weights: the logits are the sum of their
            products, such as those of a frozen head and of its adapter.
        weight: (classes, width), of the dtype of ``hidden``. In 16 bits its gradient is rounded once a chunk.
        labels: integers (...).
        chunks: into how many parts the rows are cut: all dims of ``labels`` count as rows.
        bias: (classes,).
        ignore_index: labels with this value have loss 0 and do not count.
        reduction: ``"mean"``, ``"sum"``, ``"none"`` for losses of the shape of ``labels``, or ``"parts"`` for an
            ``fs.Mean`` of the sum and the count, which is exact where ranks have unequal counts.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each loss.
        label_smoothing: as for ``F.cross_entropy``, from 0 to 1.
        softcap: replaces logits by ``softcap * tanh(logits / softcap)``, in float32 or float64.
        axis: the axis that cuts the rows of ``weight`` and ``bias`` (``fs.parallel.column_rule``). Hidden states and
            labels are equal on its ranks.
        vocab: the number of classes, if the weights have more rows, of all ranks together.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        The loss in float32 (float64 for float64); with ``reduction="parts"`` an ``fs.Mean``.

    Raises:
        PlanError: shapes or dtypes that do not fit, more chunks than rows, a label that is no class, or an option out
            of range.

    >>> hidden, weight = torch.zeros(6, 4), torch.ones(3, 4)
    >>> fs.chunked_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 0, 1, 2]), chunks=2)  # log(3)
    tensor(1.0986)
    """
    hiddens = [hidden] if isinstance(hidden, Tensor) else [*hidden]
    weights = [weight] if isinstance(weight, Tensor) else [*weight]
    _check_options(chunks, reduction, z_loss, label_smoothing, softcap)
    _check_shapes(hiddens, weights, bias, labels, chunks)
    _check_dtypes([*hiddens, *weights, *([] if bias is None else [bias])], labels)
    for leaf in (*weights, bias) if axis is not None else ():
        check_cut(leaf, str(axis), 0, NAME, "fs.parallel.column_rule")
    loss = HeadLoss(
        _classes(weights[0].shape[0], axis, vocab, mesh), ignore_index, z_loss, label_smoothing, softcap, axis, mesh
    )
    check_ids(labels, loss.classes, ignore_index, NAME)
    rows = labels.reshape(-1)
    kind = hiddens[0].device.type
    hiddens, weights, bias = _as_autocast(kind, hiddens, weights, bias)
    with torch.autocast(kind, enabled=False):
        flat = [each.reshape(-1, each.shape[-1]) for each in hiddens]
        head = ChunkedHead(loss, chunks)
        if reduction == "none":
            return head.again(flat, weights, bias, rows).reshape(labels.shape)
        total = head.total(flat, weights, bias, rows)
    if reduction == "sum":
        return total
    count = (rows != ignore_index).sum()
    return total / count if reduction == "mean" else Mean(total, count)


def _as_autocast(
    kind: str, hiddens: list[Tensor], weights: list[Tensor], bias: Tensor | None
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """The same in the dtype of autocast where that is on; float64 stays."""
    if not torch.is_autocast_enabled(kind) or hiddens[0].dtype == torch.float64:
        return hiddens, weights, bias
    dtype = torch.get_autocast_dtype(kind)
    cast = None if bias is None else bias.to(dtype)
    return [each.to(dtype) for each in hiddens], [each.to(dtype) for each in weights], cast


def _classes(width: int, axis: str | None, vocab: int | None, mesh: Mesh | None) -> int:
    """The number of classes, of all ranks."""
    parts = 1 if axis is None else collectives.axis_size(axis, mesh=mesh)
    if vocab is not None and not 0 < vocab <= width * parts:
        raise PlanError(
            f"{NAME}: vocab={vocab}, but {parts} ranks with {width} rows of the weight each have {width * parts}: pad "
            f"it to fs.parallel.padded({vocab}, {parts}) = {padded(max(vocab, 1), parts)} rows"
        )
    return width * parts if vocab is None else vocab


def _check_options(chunks: int, reduction: str, z_loss: float, smoothing: float, softcap: float | None) -> None:
    numbers = [("z_loss", z_loss), ("label_smoothing", smoothing), ("softcap", 1.0 if softcap is None else softcap)]
    expect(f"fs.{NAME}", [(name, each, (int, float), "a number") for name, each in numbers])
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise PlanError(f"{NAME}: chunks={chunks!r}: give a number of chunks, from 1 on")
    if reduction not in REDUCTIONS:
        raise PlanError(f"{NAME}: reduction={reduction!r} is none of {', '.join(map(repr, REDUCTIONS))}")
    if not 0 <= smoothing <= 1:
        raise PlanError(f"{NAME}: label_smoothing={smoothing!r}: give a number from 0 to 1")
    if not math.isfinite(z_loss) or z_loss < 0:
        raise PlanError(f"{NAME}: z_loss={z_loss!r}: give a weight from 0 on")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise PlanError(f"{NAME}: softcap={softcap!r}: give a number above 0, or None for no cap")


def _check_shapes(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, labels: Tensor, chunks: int
) -> None:
    tensors = [("hidden", each) for each in hiddens] + [("weight", each) for each in weights] + [("labels", labels)]
    expect(f"fs.{NAME}", [(name, each, Tensor, "a tensor") for name, each in tensors])
    if not hiddens or len(hiddens) != len(weights):
        raise PlanError(f"{NAME}: {len(hiddens)} hidden and {len(weights)} weight: give one weight for each hidden")
    for hidden, weight in zip(hiddens, weights, strict=True):
        fits = hidden.dim() > 0 and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
        if not fits or len(weight) != len(weights[0]):
            raise PlanError(
                f"{NAME}: hidden {list(hidden.shape)} and weight {list(weight.shape)}: give hidden (..., width) and "
                f"weight (classes, width)"
            )
        if hidden.shape[:-1] != labels.shape:
            raise PlanError(
                f"{NAME}: hidden {list(hidden.shape)} needs labels {list(hidden.shape[:-1])}, and got "
                f"{list(labels.shape)}"
            )
    rows = weights[0].shape[0]
    if bias is not None and list(bias.shape) != [rows]:
        raise PlanError(
            f"{NAME}: bias {list(bias.shape)} of a weight {list(weights[0].shape)}: give one number a class"
        )
    if chunks > labels.numel():
        raise PlanError(
            f"{NAME}: chunks={chunks} of {labels.numel()} rows (labels {list(labels.shape)}): give at most "
            f"{max(labels.numel(), 1)} chunks"
        )


def _check_dtypes(tensors: Sequence[Tensor], labels: Tensor) -> None:
    dtypes = {each.dtype for each in tensors}
    autocast = torch.is_autocast_enabled(tensors[0].device.type)
    if not all(each.is_floating_point for each in dtypes) or (len(dtypes) > 1 and not autocast):
        names = ", ".join(sorted(map(str, dtypes)))
        raise PlanError(f"{NAME}: hidden, weight and bias of {names}: give one floating dtype")
    if labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise PlanError(f"{NAME}: labels of {labels.dtype}: give integers, such as torch.long")
