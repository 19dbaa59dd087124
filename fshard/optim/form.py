"""What an optimizer keeps of a leaf, and how much of the leaf it needs on one rank."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

Grain = int | Literal["matrix", "leaf"]
"""How much of a leaf an update must see in one piece: that many elements, counted from the leaf's start (1 for
elementwise rules), the last two dims whole, or the whole leaf."""


@dataclass(frozen=True)
class Form:
    """What an optimizer keeps of one leaf under one name.

    Attributes:
        shape: None for numbers that go with the leaf's elements, and are cut as it is; else a shape of its own, kept
            by every rank that holds some of the leaf, equal on all of them.
        dtype: None for that of the leaf.
        block: how many elements of the leaf, counted from its start, one number goes with.
        wide: float32 at least, where the dtype is that of the leaf.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    block: int = 1
    wide: bool = False

    def typed(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of what is kept of a leaf of this dtype."""
        if self.dtype is not None:
            return self.dtype
        return torch.promote_types(leaf, torch.float32) if self.wide else leaf

    def count(self, elements: int) -> int:
        """How many numbers go with a piece of so many elements of the leaf, which begins at a multiple of ``block``.

        >>> Form(block=256).count(300), Form(shape=(3, 4)).count(300), Form(shape=(3, 4)).count(0)
        (2, 12, 0)
        """
        if self.shape is None:
            return -(-elements // self.block)
        return math.prod(self.shape) if elements else 0

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept of a leaf of this shape, over all ranks."""
        if self.shape is not None:
            return self.shape
        return shape if self.block == 1 else (self.count(math.prod(shape)),)


@dataclass(frozen=True)
class LeafInfo:
    """What an optimizer may know of a leaf: its path, its whole shape, and whether it has gradients."""

    path: str
    shape: tuple[int, ...]
    trainable: bool = True
