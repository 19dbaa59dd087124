"""Refusals of what cannot be computed for several samples at once: the operator, its unit and leaves, and a remedy."""

from collections.abc import Sequence
from typing import Any

from fshard.errors import PlanError, TransformError
from fshard.runtime.engine.batch import along_rows
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of

TOGETHER = "and samples are computed together"

REASONS = {
    "randomness error mode": f"draws from torch's generator, {TOGETHER}, so that none would have random numbers of its "
    f"own: give each sample a key with the batch, and use fs.random, such as fs.random.dropout(key, x, 0.1); or split "
    f"the module in eval mode (module.eval())",
    "Batching rule not implemented": f"has no form in PyTorch for several samples at once, {TOGETHER}: write it in "
    f"operators that have one; of nn.RNN, nn.GRU and nn.LSTM a loop over positions of F.linear and activations",
    "requires_grad_": "prepares a derivative by plain autograd, and the loss of a sample runs under torch.vmap: take "
    "it by torch.func.grad, or torch.func.vjp",
    "inside a functorch transform": "differentiates by plain autograd, and the loss of a sample runs under torch.vmap: "
    "take the derivative by torch.func.grad, or torch.func.vjp",
    "data-dependent control flow": f"decides by a sample's values, {TOGETHER}: compute both cases, and choose by "
    f"torch.where",
    ".item() on": f"reads a sample's values, {TOGETHER}: keep them in tensors, and choose by torch.where",
}
"""Words for errors of PyTorch, by a part of each."""


def refused(error: RuntimeError, func: Any, unit: str, leaves: Sequence[str]) -> TransformError | None:
    """The words for an operator's error under ``torch.vmap``; None for an error of another kind."""
    text = str(error)
    why = next((why for part, why in REASONS.items() if part in text), None)
    return None if why is None else TransformError(f"{_where(unit, leaves)}{_name(func)} {why}")


def hooked(func: Any, unit: str, leaves: Sequence[str]) -> TransformError:
    """The error of an operator under hooks on what autograd saves, that the loss has set."""
    return TransformError(
        f"{_where(unit, leaves)}{_name(func)} runs under hooks on saved tensors, as torch.utils.checkpoint and "
        f"save_on_cpu set them. They would see all samples at once, outside of torch.vmap: recompute by fs.remat"
    )


def renormed(func: Any, unit: str, leaves: Sequence[str]) -> TransformError:
    """The error of an embedding with ``max_norm``."""
    return TransformError(
        f"{_where(unit, leaves)}{_name(func)} with max_norm= writes to its leaf, which is gathered, so that the write "
        f"would be lost: compute a new table, such as weight / weight.norm(dim=1, keepdim=True).clamp(min=1)"
    )


def check_whole(plan: Plan, what: str) -> None:
    """Refuse samples or leaves that several ranks have parts of: each rank would clip its part as if it were all."""
    spec = plan.batch
    if not along_rows(spec) or any(plan.mesh.axis_size(axes_of(entry)) > 1 for entry in spec.dims[1:]):
        raise PlanError(
            f"fs.func.{what}: samples lie along dim 0, and batch={spec} cuts other dims, so that ranks would take "
            f"parts of samples for samples: share them along dim 0 alone, batch=P('axis'), with the samples there"
        )
    cut = [leaf for leaf in plan.leaves.values() if plan.mesh.axis_size(leaf.compute.axes) > 1]
    if cut:
        raise PlanError(
            f"fs.func.{what}: ranks compute with parts of {len(cut)} leaves, such as {cut[0].path} "
            f"{list(cut[0].shape)} by {cut[0].compute}, and the gradient of a sample is that of whole leaves: take it "
            f"on a mesh on which the axes {cut[0].compute.axes} have one rank, for example from a checkpoint"
        )


def _where(unit: str, leaves: Sequence[str]) -> str:
    more = f" and {len(leaves) - 1} more leaves" if len(leaves) > 1 else ""
    return "".join([f"in unit {unit}, "] * bool(unit) + [f"on {path}{more}, " for path in leaves[:1]])


def _name(func: Any) -> str:
    return getattr(func, "__name__", "an operator")
