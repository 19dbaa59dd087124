"""Metrics of an update."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of an update.

    Attributes:
        grad_norm: the norm of the gradients of the updated leaves before clipping, 0-dim, float32 or wider, equal on
            all ranks. Where ``fs.optim.every`` updates, it is that of the mean over its calls.
        skipped: whether nothing was updated, since the gradient was not finite at this loss scale, or its norm exceeds
            ``skip_norm=`` or is not finite, or ``skip=`` said so; 0-dim, bool.
        grad_norms: norms before clipping, by name: of the leaves of each rule of ``clip_norm=[...]``, and of what
            ``make_update(norms=)`` asks for; as ``grad_norm``.
    """

    grad_norm: Tensor
    skipped: Tensor
    grad_norms: Mapping[str, Tensor] = field(default_factory=dict)
