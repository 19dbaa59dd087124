"""A rank's part of whole rows, with what a part does not show: positions, documents, the tokens that follow."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard.arguments import expect
from fshard.collectives.scope import AxisName
from fshard.errors import PlanError
from fshard.parallel.zigzag import zigzag_slice
from fshard.sharding.mesh import Mesh


def document_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of each token's document, for ``documents=`` of attention.

    Args:
        cu_seqlens: (documents + 1,), integers: where each document of a row begins, from 0, and where the last one
            ends, as kernels for variable lengths take them. Its values are read by the host.
        length: the tokens of the row.

    Returns:
        (length,) int64 on the device of ``cu_seqlens``: documents counted from 0, and -1 after the last one.

    Raises:
        PlanError: the numbers do not begin with 0, they descend, or the last one exceeds the length.

    >>> fs.parallel.document_ids(torch.tensor([0, 3, 5]), 6)
    tensor([ 0,  0,  0,  1,  1, -1])
    """
    offsets = (cu_seqlens, Tensor, "a tensor of the documents' offsets")
    expect("document_ids(cu_seqlens, length)", [("cu_seqlens", *offsets), ("length", length, int, "tokens of a row")])
    numbers = cu_seqlens.tolist() if cu_seqlens.dim() == 1 and not cu_seqlens.is_floating_point() else []
    rising = all(a <= b for a, b in zip(numbers, numbers[1:], strict=False))
    if not numbers or numbers[0] != 0 or not rising or numbers[-1] > length:
        shown = numbers if 0 < len(numbers) <= 8 else f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise PlanError(
            f"document_ids: cu_seqlens={shown} of a row of {length} tokens must be integers in one dim that begin with "
            f"0, do not descend, and end at {length} or before"
        )
    sizes = torch.cat((cu_seqlens.long().diff(), cu_seqlens.new_tensor([length - numbers[-1]], dtype=torch.int64)))
    ids = torch.arange(len(sizes), device=sizes.device)
    ids[-1] = -1
    return ids.repeat_interleave(sizes, output_size=length)


IGNORED = -100
"""The label where there is none."""


def context_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    axis: AxisName = "cp",
    mesh: Mesh | None = None,
) -> dict[str, Tensor]:
    """This rank's part of whole rows, as arguments of a causal language model of Hugging Face.

    Args:
        input_ids: (rows, time), whole along time on every rank.
        labels: (rows, time), the tokens to predict, as transformers takes them: not shifted, -100 where there is none.
        documents: (rows, time), integers: the number of each token's document, negative for padding; see
            ``document_ids``.
        axis: the context-parallel axis, or both of them, the ring's first.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        Tensors (rows, time / ranks), cut by ``zigzag_slice``: ``input_ids``; ``position_ids`` in the whole row, or in
        each document; ``documents``, if there are any; and with labels ``shift_labels``, which are those of the next
        token of the same document, and ``labels``, without which transformers computes no loss.

    Raises:
        PlanError: shapes differ, or the length is not a multiple of twice the number of ranks.

    >>> mesh, row = fs.virtual_mesh((2,), ("cp",)), torch.tensor([[5, 6, 7, 8]])
    >>> first = mesh.run(lambda: fs.parallel.context_batch(row, row, mesh=mesh))[0]
    >>> first["input_ids"].tolist(), first["position_ids"].tolist(), first["shift_labels"].tolist()
    ([[5, 8]], [[0, 3]], [[6, -100]])
    """
    whole = {"input_ids": input_ids, "labels": labels, "documents": documents}
    given = {name: x for name, x in whole.items() if x is not None}
    expect("context_batch(input_ids, labels, documents=)", [(name, x, Tensor, "a tensor") for name, x in given.items()])
    shapes = {name: list(x.shape) for name, x in given.items()}
    if input_ids.dim() != 2 or any(shape != shapes["input_ids"] for shape in shapes.values()):
        raise PlanError(f"context_batch: shapes {shapes} must be one, (rows, time), whole along time")
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    given["position_ids"] = places if documents is None else places - _starts(documents, places)
    if labels is not None:
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if documents is not None:
            last = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
            following = following.masked_fill(last | (documents < 0), IGNORED)
        given["shift_labels"] = following
    return {name: zigzag_slice(x, axis=axis, mesh=mesh) for name, x in given.items()}


def _starts(documents: Tensor, places: Tensor) -> Tensor:
    """The place of the first token of each token's document."""
    new = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places.masked_fill(~new, 0).cummax(1).values
