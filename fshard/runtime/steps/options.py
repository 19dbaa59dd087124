"""The options of a train step: which of them cannot be, or cannot be together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fshard.optim import checks
from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.optim.scaling import LossScale
from fshard.runtime.engine.remat import Remat
from fshard.runtime.steps.clip import Clip
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class Options:
    """What ``make_train_step`` was asked for."""

    clip: Clip
    skip_norm: float | None
    skip: Callable[[Any], bool] | None
    accumulate: int
    policy: Policy | Auto
    donate: bool
    debug: bool
    compile: str | None
    remat: Remat
    loss_scale: LossScale | None

    def told(self) -> dict[str, Any]:
        """Those that must be equal on all ranks. What a rank does with its own memory is its own affair."""
        named = {"clip_norm": self.clip.rules, "schedule": self.policy, "remat": self.remat.rules}
        kept = ("skip_norm", "accumulate", "debug", "compile", "loss_scale")
        skip = None if self.skip is None else getattr(self.skip, "__qualname__", type(self.skip).__qualname__)
        return named | {"skip": skip} | {name: getattr(self, name) for name in kept}


def step_problems(loss_fn: Any, plan: Plan, clip: Clip, accumulate: Any, policy: Policy | Auto) -> Iterator[str]:
    """Which options of a train step cannot be, or cannot be together."""
    if clip.clips and policy.update == "in_backward":
        yield "clip_norm= needs the norm of the whole gradient, which update='in_backward' never has"
    if not isinstance(accumulate, int) or accumulate < 1:
        yield f"accumulate={accumulate!r} must be an int >= 1"
    if not callable(loss_fn) or isinstance(loss_fn, torch.nn.Module):
        yield f"loss_fn is {type(loss_fn).__name__}, not a function (params, batch) that calls model.apply(params, ...)"
    full = isinstance(policy, Policy) and policy.accumulation == "full"
    if full and accumulate != 1 and any(g.reduce_dtype != g.dtype for g in plan.groups):
        yield (
            "accumulation='full' adds up whole gradients in the dtype that travels, and Precision(reduce=) rounds that "
            "at every microbatch: use accumulation='sharded'"
        )


def flag_problems(**flags: Any) -> Iterator[str]:
    """Which flags are neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            yield f"{name}={value!r} must be True or False"


def late_problems(opt: Optimizer, policy: Policy | Auto, skip_norm: Any, skip: Any) -> Iterator[str]:
    """Which options that decide after the backward whether there is an update cannot be."""
    if skip_norm is not None:
        yield from checks.number("skip_norm", skip_norm, "(0, inf)")
    if skip is not None and not callable(skip):
        yield f"skip={skip!r} must be a function of the step's metrics, or None"
    if policy.update == "in_backward" and (
        skip_norm is not None or skip is not None or contract(opt).steps is not None
    ):
        yield "skip_norm=, skip= and fs.optim.every decide when the gradient is whole: not with update='in_backward'"
