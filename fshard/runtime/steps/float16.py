"""Rules for short dtypes: gradients divided so that none vanishes, overflows or is rounded; a scaled loss."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from fshard.optim.scaling import LossScale, divisor
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan


def divisor_of(plan: Plan, parts: int, in_backward: bool) -> float:
    """Return what gradients of a plan are divided by before they are summed over the parts of the global batch."""
    trained = [group for group in plan.groups if group.trainable]
    summed = any(group.dtype == torch.float16 for group in trained)
    narrow = any(torch.float16 in (group.compute_dtype, group.reduce_dtype) for group in trained)
    if in_backward:  # the update takes sums as they come, so that they must be gradients of the mean
        return float(parts)
    if any(torch.bfloat16 in (group.dtype, group.compute_dtype) for group in trained) and not (narrow or summed):
        return 2.0 ** math.floor(math.log2(parts))  # a loss in bfloat16 would round the third of three ranks by 0.2 %
    return divisor(narrow or summed, summed, parts)


def scale_problems(loss_scale: Any, policy: Policy | Auto) -> Iterator[str]:
    """Say why a step cannot have this loss scale."""
    if not isinstance(loss_scale, LossScale | None):
        yield f"loss_scale={loss_scale!r} must be fs.LossScale(...) or None"
    elif loss_scale is not None and policy.update == "in_backward":
        yield "loss_scale= needs to see the whole gradient before it is applied, which update='in_backward' never does"


def warn_of_float16(plan: Plan, loss_scale: LossScale | None) -> None:
    """Say that small gradients vanish."""
    for group in plan.groups if loss_scale is None else ():
        if group.trainable and torch.float16 in (group.dtype, group.compute_dtype, group.reduce_dtype):
            warnings.warn(
                f"gradients of {group.leaves[0].path} are float16, in which those below 6e-8 are zero: give "
                f"make_train_step(loss_scale=fs.LossScale()), or use bfloat16",
                stacklevel=4,
            )
            return
