"""Which leaves weight decay touches."""

import re
from collections.abc import Callable, Iterable

from fshard.optim.form import LeafInfo
from fshard.patterns import meant_by

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


def idle(name: str, pattern: Decay, leaves: Iterable[LeafInfo]) -> list[str]:
    """No problem unless a regex matches the path of none of these leaves."""
    paths = [leaf.path for leaf in leaves]
    if not isinstance(pattern, str) or any(re.fullmatch(pattern, path) for path in paths):
        return []
    some = repr(paths[0]) if paths else "none that is trained"
    hint = meant_by(pattern, paths) or f", such as {some}"
    return [f"{name} = {pattern!r} matches none of the {len(paths)} leaves: a pattern matches a whole path{hint}"]
