"""Tensors that differ between ranks by right, even without dims: changed buffers, shards."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_ATTRIBUTE = "_fshard_own"


def mark_own(leaves: Iterable[Any]) -> None:
    """Mark tensors as each rank's own. Those with dims need no mark."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.ndim:
            setattr(leaf, _ATTRIBUTE, True)


def is_own(leaf: Tensor) -> bool:
    """Tell whether a tensor is marked as each rank's own."""
    return hasattr(leaf, _ATTRIBUTE)


def detached_own(leaf: Tensor) -> Tensor:
    """A tensor without its graph, with its mark."""
    found = leaf.detach()
    if is_own(leaf):
        setattr(found, _ATTRIBUTE, True)
    return found
