"""The leaves that weight decay touches."""

import re
from collections.abc import Callable
from typing import Any

from fshard.optim.form import LeafInfo
from fshard.patterns import meant_by

Decay = str | Callable[[str, tuple[int, ...]], bool] | None
r"""Which leaves decay: all (``None``), those whose whole path a regex matches, or those a function picks.

>>> decay: fs.optim.Decay = r".*\.weight"
>>> fs.optim.adamw(1e-3, weight_decay=0.1, decay=decay).hyper("head.bias", (4,))
0.0
"""


def matrices(path: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a leaf has two or more dims: true for weights and embeddings, false for biases and norm scales.

    The mask that language models are trained with since GPT-2; give it as ``decay=matrices``.

    Args:
        path: the path of the leaf, which is not looked at.
        shape: its whole shape.

    >>> fs.optim.matrices("head.weight", (10, 4)), fs.optim.matrices("norm.weight", (4,))
    (True, False)
    """
    return len(shape) >= 2


def decays(decay: Decay, path: str, shape: tuple[int, ...]) -> bool:
    """Tell whether the leaf decays under this mask."""
    if decay is None:
        return True
    if isinstance(decay, str):
        return re.fullmatch(decay, path) is not None
    return decay(path, shape)


class Masked:
    """Optimizers with a ``decay`` that picks leaves."""

    decay: Decay

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        """A ``decay`` that matches no leaf."""
        paths = [leaf.path for leaf in leaves]
        if not isinstance(self.decay, str) or any(re.fullmatch(self.decay, path) for path in paths):
            return []
        some = repr(paths[0]) if paths else "none that is trained"
        hint = meant_by(self.decay, paths) or f", such as {some}"
        return [f"decay = {self.decay!r} matches none of the {len(paths)} leaves: a pattern matches a whole path{hint}"]


class Decaying(Masked):
    """Optimizers whose ``hyper`` is the leaf's weight decay."""

    weight_decay: float

    def decay_of(self, path: str, shape: tuple[int, ...]) -> float:
        """The leaf's weight decay: 0 where ``decay`` does not pick it."""
        return float(self.weight_decay) if decays(self.decay, path, shape) else 0.0

    def hyper(self, path: str, shape: tuple[int, ...]) -> Any:
        """The leaf's weight decay."""
        return self.decay_of(path, shape)
