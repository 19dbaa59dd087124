"""Metrics of an update."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of an update.

    Attributes:
        grad_norm: the norm of the gradients of the updated leaves before clipping, 0-dim, float32 or wider, equal on
            all ranks.
        skipped: whether nothing was updated, since the gradient was not finite at this loss scale, or its norm exceeds
            ``skip_norm=`` or is not finite; 0-dim, bool.
    """

    grad_norm: Tensor
    skipped: Tensor
