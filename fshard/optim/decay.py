"""Which leaves weight decay touches."""

import re
from collections.abc import Callable

Decay = str | Callable[[str, tuple[int, ...]], bool] | None
"""Which leaves decay: all (``None``), those whose whole path a regex matches, or those a function picks."""


def matrices(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a leaf has two or more dims: true for weights and embeddings, false for biases and norm scales.

    The mask that language models are trained with since GPT-2; give it as ``decay=matrices``.

    >>> matrices("head.weight", (10, 4)), matrices("norm.weight", (4,))
    (True, False)
    """
    return len(shape) >= 2


def decays(decay: Decay, path: str, shape: tuple[int, ...]) -> bool:
    """Whether the leaf decays under this mask."""
    if decay is None:
        return True
    if isinstance(decay, str):
        return re.fullmatch(decay, path) is not None
    return decay(path, shape)
