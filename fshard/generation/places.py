"""Places of tokens: their positions, what they may attend to, and how long a cache must be."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import TreeError, lines
from fshard.generation.caches import Kept

Forward = Callable[[Any, Tensor, Any, "Places"], tuple[Tensor, Any]]
"""``forward(params, tokens, cache, places) -> (logits, cache)``: how a model reads further tokens.

``tokens`` is (rows, time), int64. ``cache`` is None at first, and then what the call before returned: any pytree of
keys and values, whose dim -2 is as long as all tokens so far, or ``fs.generation.Kept`` of anything else. ``logits`` is
(rows, time, vocabulary)."""


class Places(NamedTuple):
    """The positions of the tokens of a call, in rows that are padded on their left.

    Attributes:
        positions: (rows, time), int64: the place of each token in its own sequence, counted from 0; 0 for padding.
        keys: (rows, all tokens so far), bool: which of them are no padding.

    >>> _, places = padded([torch.tensor([5, 6]), torch.tensor([7])], torch.device("cpu"))
    >>> places.positions.tolist(), places.keys.tolist()
    ([[0, 1], [0, 0]], [[True, True], [False, True]])
    >>> places.mask[1, 0].tolist()
    [[True, False], [False, True]]
    """

    positions: Tensor
    keys: Tensor

    @property
    def mask(self) -> Tensor:
        """(rows, 1, time, all tokens so far), bool: what each token may attend to, for attention.

        Those before it and itself, without padding; padding attends to itself alone, which keeps its values finite.
        """
        time, seen = self.positions.shape[1], self.keys.shape[1]
        here = torch.arange(seen - time, seen, device=self.keys.device).unsqueeze(-1)
        there = torch.arange(seen, device=self.keys.device)
        return ((self.keys.unsqueeze(1) & (there <= here)) | (there == here)).unsqueeze(1)


def padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Places]:
    """Sequences as one tensor, padded with zeros on their left, and where its tokens stand."""
    longest = max((len(row) for row in rows), default=1)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    keys = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, longest - len(row) :] = torch.as_tensor(row)
        keys[number, longest - len(row) :] = True
    positions = (keys.cumsum(1) - 1).clamp_min(0)
    return tokens.to(device), Places(positions.to(device), keys.to(device))


def read(forward: Forward, params: Any, tokens: Tensor, cache: Any, places: Places) -> tuple[Tensor, Any]:
    """Return what a forward makes of tokens: logits and a cache, if they are such.

    Raises:
        TreeError: it returned something else; naming what.
    """
    found = forward(params, tokens, cache, places)
    pair = isinstance(found, tuple | list) and len(found) == 2
    logits = found[0] if pair else None
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        what = f"a pair of {_shown(logits)} and a cache" if pair else _shown(found)
        raise TreeError(
            f"forward(params, tokens, cache, places) returned {what}: return (logits, cache), the logits for tokens "
            f"{list(tokens.shape)} of shape {[*tokens.shape, 'vocabulary']}, and None as the cache if there is none"
        )
    return logits, check_cache(found[1], places.keys.shape[1])


def _shown(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else described(x)


def check_cache(cache: Any, seen: int) -> Any:
    """A cache, if it is as long as the tokens so far.

    Raises:
        TreeError: naming the tensors of another length.
    """
    if isinstance(cache, Kept):
        return cache
    wrong = [
        f"{name} has shape {list(leaf.shape)}"
        for name, leaf in zip(tree.names(cache, "cache"), tree.leaves(cache), strict=True)
        if isinstance(leaf, Tensor) and (leaf.ndim < 2 or leaf.shape[-2] != seen)
    ]
    if wrong:
        remedy = (
            f"Dim -2 must be {seen}, the tokens so far: append the new keys and values to those of the cache that was "
            f"given, torch.cat((cache, new), dim=-2), and return the result. States of another kind are "
            f"fs.generation.Kept(states)."
        )
        raise TreeError(lines("forward returned a cache of the wrong length:", wrong, remedy))
    return cache
