"""Floating-point operations of the operators that multiply matrices: PyTorch's own table, and what it lacks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]


def formula(func: Any) -> Formula | None:
    """The function that counts an operator's operations; None if it has none. It takes the operator's arguments, and
    its result as ``out_val=``.

    >>> count = formula(torch.ops.aten.mm.default)
    >>> count(torch.ones(2, 3), torch.ones(3, 4), out_val=torch.ones(2, 4))
    48
    """
    packet = getattr(func, "_overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name in FLASH:
        packet = getattr(torch.ops.aten, name.replace("_for_cpu", ""))
    known: Formula | None = flop_registry.get(packet)
    return known or OWN.get(name)


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Products of groups, such as those of experts: where one side has groups by offsets, each row or column is in one.

    Shapes: ``(g, m, k) @ (g, k, n)``, or one of them, or both, without ``g``: then offsets cut m, n or k.
    """
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _vector(*args: Any, **_: Any) -> int:
    """A matrix and a vector, which are the last two arguments: each element of the matrix is used once."""
    return int(2 * args[-2].numel())


def _matrices(*args: Any, **_: Any) -> int:
    """Two matrices, or as many in batches or lists, which are the last two arguments."""
    left, right = args[-2:]
    if not isinstance(left, Tensor):
        return sum(map(_matrices, left, right))
    return int(2 * left.numel() * right.shape[-1])


def _layer(x: Tensor, *args: Any, **_: Any) -> int:
    """One layer of a recurrent net in one direction: each row of its input meets all its weights."""
    return 2 * _rows(x) * _weights(args[:4])


def _layers(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """All layers of a recurrent net."""
    return 2 * _rows(x) * _weights(weights)


def _twice(count: Formula) -> Formula:
    """A backward: the gradients of both factors."""
    return lambda *args, **kwargs: 2 * count(*args, **kwargs)


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _weights(values: Sequence[Tensor]) -> int:
    return sum([w.numel() for w in values if w.ndim == 2])


FLASH = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
"""Operators that PyTorch's own table lacks; they take the arguments of those without ``_for_cpu``."""

OWN: dict[str, Formula] = {
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_foreach_mm": _matrices,
    "_int_mm": _matrices,
    "addbmm": _matrices,
    "mv": _vector,
    "addmv": _vector,
    "mkldnn_rnn_layer": _layer,
    "mkldnn_rnn_layer_backward": _twice(_layer),
    "_cudnn_rnn": _layers,
    "_cudnn_rnn_backward": _twice(_layers),
    "miopen_rnn": _layers,
    "miopen_rnn_backward": _twice(_layers),
}
"""By name, what PyTorch's own table lacks too. Steps that are made of such products would seem to take no time."""
