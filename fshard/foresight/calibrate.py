"""Calibration without a step of one's own."""

from collections.abc import Callable
from typing import Any

from fshard.optim.adamw import adamw
from fshard.optim.base import Optimizer
from fshard.schedule.costs import Costs
from fshard.sharding.plan import Plan
from fshard.training.make_step import make_train_step


def calibrate(
    loss_fn: Callable[..., Any],
    plan: Plan,
    batch: Any,
    opt: Optimizer | None = None,
    rounds: int = 5,
    processors: float | None = None,
    **options: Any,
) -> Costs:
    """The costs of training with this loss on these ranks: ``fs.make_train_step(...).calibrate(batch)``. Collective.

    Args:
        loss_fn: the loss function.
        plan: the plan.
        batch: this rank's batch.
        opt: the optimizer; by default AdamW.
        rounds: steps that are measured at least.
        processors: those that a rank has, where other jobs run beside this one.
        options: those of ``fs.make_train_step``, such as ``remat=``.

    >>> import torch, fshard as fs
    >>> mesh, params = fs.make_mesh((1,), ("data",)), {"w": torch.ones(8)}
    >>> plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])
    >>> costs = fs.sim.calibrate(lambda params, x: (params["w"] * x).sum(), plan, torch.ones(8), rounds=1)
    >>> sorted(kind for kind, _ in costs.seconds)
    ['backward', 'consensus', 'forward', 'handshake', 'update']
    """
    return make_train_step(loss_fn, opt or adamw(1e-3), plan, **options).calibrate(batch, rounds, processors)
