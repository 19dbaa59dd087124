"""Caches of transformers as trees of tensors: keys and values, windows of them, states of recurrent layers."""

from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree


class Kept(NamedTuple):
    """A model's memory of the tokens so far, in whatever form: no length is expected of it.

    A forward for ``fs.generate`` returns it where its layers keep windows, or states of their own.

    Attributes:
        state: any pytree.

    >>> import torch
    >>> Kept({"conv": torch.zeros(1, 4)}).state["conv"].shape
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
