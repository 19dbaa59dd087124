"""The numbers of documents that are packed into one row."""

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import PlanError


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

    >>> document_ids(torch.tensor([0, 3, 5]), 6)
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
