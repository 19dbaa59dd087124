"""Metrics of a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.engine.loss import Mean, as_means, no_aux
from fshard.runtime.steps import scalar, widened


@dataclass(frozen=True)
class Metrics:
    """Metrics of a train step. Tensors are 0-dim, float32 or wider, equal on all ranks.

    Attributes:
        loss: the mean over the global batch, before the update; float64 where the loss is.
        grad_norm: the norm of the gradient over all leaves, before clipping; float64 where a trained leaf is.
        aux: the auxiliary values of the loss function. ``fs.Mean`` leaves are global means; other leaves are
            this rank's own, stacked along a new first dim if the step has several microbatches (a list if their shapes
            differ).
        skipped: whether the step was skipped, by ``skip_norm=``, ``skip=``, or because its gradient was not finite at
            this loss scale: parameters and optimizer state are unchanged.
        stop: whether any rank asked to stop: ``step(state, batch, stop=True)``.
    """

    loss: Tensor
    grad_norm: Tensor
    aux: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False
    stop: bool = False


def combine_aux(parts: Sequence[Any], means: Sequence[float]) -> Any:
    """The auxiliary values of all microbatches, with the global ``means`` in the place of each ``fs.Mean``."""
    if not parts or no_aux(parts[0]) or not tree.leaves(parts[0]):
        return parts[0] if parts else {}
    found = iter(means)
    flat = [tree.flatten(part) for part in parts]
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return tree.unflatten(flat[0][1], [_combine(column, found) for column in columns])


def global_result(result: Any, means: Sequence[float]) -> Any:
    """An evaluation's result: 0-dim floating leaves and ``fs.Mean`` as global means, others as they are."""
    return combine_aux([as_means(result)], means)


def _combine(column: Sequence[Any], means: Iterator[float]) -> Any:
    if isinstance(column[0], Mean):
        return scalar(next(means), widened([column[0].total.dtype]))
    column = [x.detach() if isinstance(x, Tensor) else x for x in column]
    if len(column) == 1:
        return column[0]
    alike = len({x.shape if isinstance(x, Tensor) else None for x in column}) == 1
    return torch.stack(column) if alike and isinstance(column[0], Tensor) else column
