"""What optimizers whose buffers are not like parameters, or whose rule is not elementwise, say of themselves.

An optimizer such as ``sgd`` keeps buffers of a parameter's length and updates each element by itself, so it need not
say anything. Others have one or more of these methods besides those of ``Optimizer``:

* ``forms(hyper) -> dict[str, Form]``: what it keeps of a leaf; its ``init`` then takes ``(param, hyper)``.
* ``grain(hyper) -> Grain``: how much of a leaf one rank must hold in one piece.
* ``problems(leaves) -> list[str]``: what of its arguments does not fit the leaves of a plan.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

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


def forms_of(opt: Any, hyper: Any) -> dict[str, Form]:
    """What an optimizer keeps of a leaf of which its ``hyper`` is this."""
    if hasattr(opt, "forms"):
        return dict(opt.forms(hyper))
    return dict.fromkeys(opt.init(torch.empty(0)), Form())


def start_of(opt: Any, param: torch.Tensor, hyper: Any) -> dict[str, torch.Tensor]:
    """The state of a slice before its first update."""
    return dict(opt.init(param, hyper) if hasattr(opt, "forms") else opt.init(param))


def grain_of(opt: Any, hyper: Any) -> Grain:
    """How much of a leaf an optimizer must see in one piece."""
    grain: Grain = opt.grain(hyper) if hasattr(opt, "grain") else 1
    return grain


def problems_of(opt: Any, leaves: list[LeafInfo]) -> list[str]:
    """What of an optimizer's arguments does not fit the leaves that it is given."""
    return list(opt.problems(leaves)) if hasattr(opt, "problems") else []
