"""Positions of what a rank holds in the whole leaf: what makes random numbers independent of the mesh."""

import torch
from torch import Tensor

from fshard.sharding.layout import Piece


def global_index(shape: tuple[int, ...], piece: Piece, device: torch.device) -> Tensor:
    """The row-major index in the whole leaf of each element of a piece, int64."""
    index = torch.arange(piece.start, piece.stop, device=device)
    if piece.shape == shape:
        return index
    out = torch.zeros_like(index)
    stride = 1
    for dim in reversed(range(len(shape))):
        out += (index % piece.shape[dim] + piece.offset[dim]) * stride
        index = index // piece.shape[dim]
        stride *= shape[dim]
    return out
