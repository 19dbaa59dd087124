"""Places of tokens: their positions, what they may attend to, and their caches as trees of tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import TreeError, lines


class Kept(NamedTuple):
    """A model's memory of the tokens so far, in whatever form: no length is expected of it.

    A forward for ``fs.generate`` returns it where its layers keep windows, or states of their own.

    Attributes:
        state: any pytree.

    >>> fs.generation.Kept({"conv": torch.zeros(1, 4)}).state["conv"].shape
    torch.Size([1, 4])
    """

    state: Any


def taken(cache: Any) -> Kept:
    """The tensors of a cache of ``transformers``, layer by layer, and what else describes them."""
    return Kept([_described(layer) for layer in cache.layers])


def given(cache: Any, kept: Kept, seen: int) -> Any:
    """A new cache with the tensors of a kept one; ``seen`` tokens were read before."""
    for layer, held in zip(cache.layers, kept.state, strict=True):
        for name, value in held.items():
            setattr(layer, name, _own(name, value))
        if isinstance(getattr(layer, "cumulative_length", None), int):
            layer.cumulative_length = seen
        tensors = [leaf for leaf in tree.leaves(held) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tensors:
            layer.dtype, layer.device = tensors[0].dtype, tensors[0].device
    return cache


def _described(layer: Any) -> dict[str, Any]:
    """The attributes of a layer but numbers, which follow from the tokens so far."""
    held = {name: value for name, value in vars(layer).items() if _is_kept(value) and not _is_number(value)}
    return {name: _by_text(value) if isinstance(value, dict) else value for name, value in held.items()}


def _by_text(rows: dict[int, Any]) -> dict[str, Any]:
    """States by their number, as a pytree has them."""
    return {str(number): one for number, one in rows.items()}


def _own(name: str, value: Any) -> Any:
    """A value as a layer holds it; layers write to states, and make new keys and values."""
    if isinstance(value, dict):
        return {int(number): _own(name, one) for number, one in value.items()}
    return value.clone() if isinstance(value, Tensor) and name not in ("keys", "values") else value


def _is_kept(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(number, int) and _is_kept(one) for number, one in value.items())
    return value is None or isinstance(value, Tensor | bool | int)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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

    >>> places = fs.generation.Places(torch.tensor([[0, 1], [0, 0]]), torch.tensor([[True, True], [False, True]]))
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
