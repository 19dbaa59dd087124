"""The form of an optimizer's buffers: what it keeps of a leaf, and how much of the leaf it needs on one rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Grain = int | Literal["matrix", "leaf"]
"""How much of a leaf an update must see in one piece: that many elements, counted from the leaf's start (1 for
elementwise rules), the last two dims whole, or the whole leaf."""


@dataclass(frozen=True)
class Form:
    """One buffer of an optimizer for one leaf.

    Attributes:
        shape: None for one number an element or block of the leaf, cut like the leaf; else a shape of its own, of
            which every rank that holds a part of the leaf keeps an equal copy.
        dtype: None for that of the leaf.
        block: elements of the leaf, counted from its start, that share one number.
        wide: float32 at least, where the dtype is that of the leaf.
        common: whether replicas that train apart (``fs.outer``) hold equal copies of it.

    >>> fs.optim.Form(dtype=torch.uint8, block=256)  # a byte for 256 elements
    Form(shape=None, dtype=torch.uint8, block=256, wide=False, common=False)
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    block: int = 1
    wide: bool = False
    common: bool = False

    def typed(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of the buffer of a leaf of this dtype."""
        if self.dtype is not None:
            return self.dtype
        return torch.promote_types(leaf, torch.float32) if self.wide else leaf

    def count(self, elements: int) -> int:
        """The buffer's length for a piece of so many elements, which begins at a multiple of ``block``.

        >>> blocks, factor = fs.optim.Form(block=256), fs.optim.Form(shape=(3, 4))
        >>> blocks.count(300), factor.count(300), factor.count(0)
        (2, 12, 0)
        """
        if self.shape is None:
            return -(-elements // self.block)
        return math.prod(self.shape) if elements else 0

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the buffer of a whole leaf of this shape."""
        if self.shape is not None:
            return self.shape
        return shape if self.block == 1 else (self.count(math.prod(shape)),)


@dataclass(frozen=True)
class LeafInfo:
    """A leaf as an optimizer sees it: its path, its whole shape, whether it has gradients, and how these are summed.

    ``rounded`` is the wire format to which ranks round gradients before they are summed; empty where sums are exact.

    >>> fs.optim.LeafInfo("head.weight", (10, 4)).trainable
    True
    """

    path: str
    shape: tuple[int, ...]
    trainable: bool = True
    rounded: str = ""


def zeros(forms: Mapping[str, Form], param: Tensor) -> dict[str, Tensor]:
    """Buffers of these forms for a slice, all zero."""
    return {
        name: torch.zeros(form.count(len(param)), dtype=form.dtype or param.dtype, device=param.device)
        for name, form in forms.items()
    }
