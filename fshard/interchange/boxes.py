"""Boxes of a tensor in a file, read into place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.checkpoint.write import raw
from fshard.reading.files import File

SLAB = 4 << 20
"""Bytes of a file that are read at a time if only parts of rows are needed."""


def read_box(
    file: File, begin: int, shape: Sequence[int], offset: Sequence[int], out: Tensor, dtype: torch.dtype
) -> None:
    """Copy the box at ``offset`` of a row-major tensor to ``out``, of any dtype and device, with a few MiB of memory.

    The tensor lies in the file from byte ``begin`` on, and has this shape and dtype.
    """
    if not out.numel():
        return
    if not shape:
        return read_box(file, begin, (1,), (0,), out.view(1), dtype)
    width = dtype.itemsize
    row = math.prod(shape[1:]) * width
    if row > SLAB:
        for at in range(out.shape[0]):
            read_box(file, begin + (offset[0] + at) * row, shape[1:], offset[1:], out[at], dtype)
        return None
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(o * n for o, n in zip(offset[1:], strides[1:], strict=True)) * width
    last = first + (sum((size - 1) * n for size, n in zip(out.shape[1:], strides[1:], strict=True)) + 1) * width
    whole = tuple(out.shape[1:]) == tuple(shape[1:])
    step = max(1, SLAB // row)
    for at in range(0, out.shape[0], step):
        part = out[at : at + step]
        low = begin + (offset[0] + at) * row + first
        high = begin + (offset[0] + at + part.shape[0] - 1) * row + last
        if whole and part.dtype == dtype and part.device.type == "cpu" and part.is_contiguous():
            file.fill(raw(part), low)
        else:
            read = torch.frombuffer(file.read(low, high), dtype=dtype)
            part.copy_(read.as_strided(tuple(part.shape), tuple(strides)))
    return None
