"""Functions of losses on shards: derivatives in directions, Hessians, gradients of single samples, for ``torch.func``.

``fs.value_and_grad`` is the fast way to a gradient. These are for all else (docs/transforms.md).
"""

from fshard.transform.conjugate_gradients import Solution, cg
from fshard.transform.directional import jvp
from fshard.transform.gauss_newton import gnvp
from fshard.transform.lanczos_method import Lanczos, lanczos
from fshard.transform.linearized import linearize
from fshard.transform.optimizer import differentiable
from fshard.transform.products import hvp
from fshard.transform.samples import clipped_grad, per_sample_grad
from fshard.transform.scheduled_loss import sharded_loss
from fshard.transform.trace_samples import hessian_trace_samples

__all__ = [
    "Lanczos",
    "Solution",
    "cg",
    "clipped_grad",
    "differentiable",
    "gnvp",
    "hessian_trace_samples",
    "hvp",
    "jvp",
    "lanczos",
    "linearize",
    "per_sample_grad",
    "sharded_loss",
]


def __dir__() -> list[str]:
    return sorted(__all__)
