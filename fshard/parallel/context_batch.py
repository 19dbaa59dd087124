"""A rank's part of whole rows, with what a model cannot know of a part: positions, and the tokens that follow."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard.arguments import expect
from fshard.collectives.scope import AxisName
from fshard.errors import PlanError
from fshard.parallel.zigzag import zigzag_slice
from fshard.sharding.mesh import Mesh

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

    >>> import fshard as fs
    >>> mesh, row = fs.virtual_mesh((2,), ("cp",)), torch.tensor([[5, 6, 7, 8]])
    >>> first = mesh.run(lambda: context_batch(row, row, mesh=mesh))[0]
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
