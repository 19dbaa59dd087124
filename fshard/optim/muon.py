"""Muon: the momentum of a matrix, made orthogonal."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused
from fshard.optim.decay import Decay, Decaying
from fshard.optim.form import Form, Grain, LeafInfo
from fshard.torch_internals import foreach_lerp, foreach_lerp_, foreach_mul_

Hyper = tuple[int, int, float]
"""Rows, columns and the weight decay."""


@dataclass(frozen=True)
class muon(Decaying, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024).

    Equal to ``torch.optim.Muon``.

    The momentum of each matrix is replaced by nearly the closest matrix with orthogonal rows or columns, by a few steps
    of Newton and Schulz. That needs whole matrices: give their rules ``align="leaf"``, so that each lies on one rank,
    which then needs no other to update it, and does its share of the products. Leaves of three dims are stacks of
    matrices. Everything else needs another optimizer, by ``fs.optim.partition``.

    Args:
        lr: the learning rate, >= 0, or a function of the step.
        momentum: how much of the momentum is kept, in [0, 1).
        nesterov: look ahead along the new momentum.
        weight_decay: the fraction of a parameter that an update of learning rate 1 takes away, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.
        adjust: how the learning rate depends on the shape, rows by columns: ``"original"`` by ``sqrt(max(1, rows /
            columns))``; ``"match_rms_adamw"`` by ``0.2 sqrt(max(rows, columns))``, so that AdamW's rates can be used
            (Liu et al., "Muon is Scalable for LLM Training", 2025); ``"none"``.
        iterations: how many, 1 to 99.
        coefficients: of its polynomial.
        eps: the least norm that a momentum is divided by, above 0.
        dtype: of the iteration.

    Raises:
        PlanError: arguments out of range. From ``fs.init_state``: leaves that are not matrices, or that are cut.

    >>> fs.optim.muon(0.02).hyper("blocks.0.weight", (64, 32))
    (64, 32, 0.1)
    """

    lr: Rate
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    decay: Decay = None
    adjust: str = "original"
    iterations: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        problems = []
        if self.adjust not in ("original", "match_rms_adamw", "none"):
            problems.append(f"adjust = {self.adjust!r}: must be 'original', 'match_rms_adamw' or 'none'")
        if not isinstance(self.coefficients, tuple) or len(self.coefficients) != 3:
            problems.append(f"coefficients = {self.coefficients!r}: must be a tuple of three numbers")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            problems.append(f"dtype = {self.dtype!r}: must be a floating-point dtype")
        wants = {"momentum": "[0, 1)", **checks.DECAYING, "eps": "(0, inf)", "iterations": "[1, 99]"}
        checks.require(self, *problems, lr=checks.rate, **wants)

    def init(self, param: Tensor, hyper: Any = None) -> State:
        """The momentum, zero."""
        return {"momentum_buffer": torch.zeros_like(param)}

    def hyper(self, path: str, shape: tuple[int, ...]) -> Hyper:
        """The rows and columns of the leaf's matrices, and its weight decay."""
        rows, columns = (1, 1, *shape)[-2:]
        return rows, columns, self.decay_of(path, shape)

    def forms(self, hyper: Hyper) -> dict[str, Form]:
        """A momentum like the leaf."""
        return {"momentum_buffer": Form()}

    def grain(self, hyper: Hyper) -> Grain:
        """Whole matrices."""
        return "matrix"

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        """Leaves that are not matrices, and a ``decay`` that matches no leaf."""
        other = [leaf for leaf in leaves if leaf.trainable and len(leaf.shape) not in (2, 3)]
        return super().problems(leaves) + [
            f"muon: {leaf.path}  {list(leaf.shape)} is neither a matrix nor a stack of matrices: give it another "
            f"optimizer, fs.optim.partition([(pattern, fs.optim.muon(...)), (r'.*', fs.optim.adamw(...))])"
            for leaf in other
        ]

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: Hyper) -> None:
        rows, columns, decay = hyper
        larger, ratio = max(rows, columns), max(1.0, rows / columns)
        factor = {"original": math.sqrt(ratio), "match_rms_adamw": 0.2 * math.sqrt(larger), "none": 1.0}[self.adjust]
        kept = [state["momentum_buffer"] for state in states]
        foreach_lerp_(kept, grads, 1 - self.momentum)
        directions = foreach_lerp(grads, kept, self.momentum) if self.nesterov else kept
        if decay:
            foreach_mul_(params, 1 - lr * decay)
        for param, direction in zip(params, directions, strict=True):
            matrices = direction.view(-1, rows, columns)
            if len(matrices) == 1:
                matrices = matrices[0]
            param.view(matrices.shape).add_(self._orthogonal(matrices), alpha=-lr * factor)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """The iteration; on the side of each matrix that makes the products smaller."""
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.to(self.dtype)
        x = x.mT if tall else x
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=self.eps)
        a, b, c = self.coefficients
        add = torch.addmm if x.ndim == 2 else torch.baddbmm
        for _ in range(self.iterations):
            gram = x @ x.mT
            x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x
