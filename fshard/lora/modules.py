"""Low-rank adapters: classes, derived from a module's own, whose weights have adapters beside them.

An adapted weight *reads* as ``weight + scale * b @ a``, wherever code asks for it. Modules of torch
and of transformers that compute a product alone add ``x @ a @ b`` to it instead: no whole matrix is made, and none is
saved for the backward.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

A, B = "_lora_a", "_lora_b"
"""The suffixes that name the adapters of a weight."""

PATHS = r".*_lora_[ab]"
"""The paths of all adapters, for rules: a hand-written function's tree is frozen and trained by them.

>>> import re
>>> [bool(re.fullmatch(fs.lora.PATHS, path)) for path in ("up.weight", "up.weight_lora_a")]
[False, True]
"""

Kind = type[nn.Module]


def shapes(shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the adapters of a weight, by suffix: ``(..., n, m)`` has ``(..., rank, m)`` and ``(..., n, rank)``.

    >>> shapes((8, 4), 2)
    {'_lora_a': (2, 4), '_lora_b': (8, 2)}
    """
    *batch, n, m = shape
    return {A: (*batch, rank, m), B: (*batch, n, rank)}


def delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The sum that adapters add to their weight."""
    return torch.matmul(b, a) * scale


def linear(weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, x: Tensor, scale: float) -> Tensor:
    """A linear layer and its adapters, which compute in their own dtype."""
    out = F.linear(x, weight, bias)
    return out + (F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(out.dtype)


def adapt(
    module: nn.Module, weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]], scale: float, made: dict[Any, Kind]
) -> None:
    """Give weights of a module that has no other user adapters, by name.

    The module changes its class; its parameters stay where they are. ``made`` holds the classes made so far, so that
    equal modules share one class.
    """
    for name, (a, b) in weights.items():
        module._parameters[name + A], module._parameters[name + B] = a, b
    key = (type(module), tuple(weights))
    if key not in made:
        kind = type(module)
        body: dict[str, Any] = {name: property(functools.partial(_effective, name=name)) for name in weights}
        if list(weights) == ["weight"] and (forward := _forward(module)) is not None:
            body["forward"] = forward
        made[key] = type(f"Lora{kind.__name__}", (kind,), body | {"__module__": kind.__module__})
    module.__class__ = made[key]
    vars(module)["lora_scale"] = scale


def _effective(self: nn.Module, name: str) -> Tensor:
    weight, a, b, scale = _held(self, name)
    return weight + delta(a, b, scale).to(weight.dtype)


def _forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """A forward that makes no whole matrix; None unless the module is known to compute a product alone."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return _linear
    if kind.__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer with a transposed weight
        return _transposed
    plain = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    if kind.forward is nn.Embedding.forward and all(getattr(module, k) == v for k, v in plain.items()):
        return _embedding
    return None


def _held(self: nn.Module, name: str = "weight") -> tuple[Tensor, Tensor, Tensor, float]:
    held = self._parameters
    weight, a, b = held[name], held[name + A], held[name + B]
    assert weight is not None and a is not None and b is not None
    return weight, a, b, vars(self)["lora_scale"]


def _linear(self: Any, input: Tensor) -> Tensor:
    weight, a, b, scale = _held(self)
    return linear(weight, a, b, self.bias, input, scale)


def _transposed(self: Any, x: Tensor) -> Tensor:
    weight, a, b, scale = _held(self)
    return linear(weight.t(), b.t(), a.t(), self.bias, x, scale)


def _embedding(self: Any, input: Tensor) -> Tensor:
    weight, a, b, scale = _held(self)
    out = F.embedding(input, weight)
    return out + (F.embedding(input, b) @ a * scale).to(out.dtype)
