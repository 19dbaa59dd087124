"""``fs.func.hessian_trace_samples``: estimates of the trace of a Hessian."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.model.random import fold_in
from fshard.runtime.comm import collective_call
from fshard.runtime.steps.step_options import read_running
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.transform import random_trees, tree_vectors
from fshard.transform.linearized import KEPT
from fshard.transform.products import HessianProduct, hvp
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules, check_arguments
from fshard.transform.sharded_loss import LossFn
from fshard.transform.slopes import Curvatures


class TraceSamples(MayBeScheduled):
    """``probes(params, batch, key)``. Made by ``fs.func.hessian_trace_samples``.

    Attributes:
        product: the Hessian-vector product.
        samples: the number of samples.
        plan: the plan.
        together: samples of one run.
    """

    def __init__(self, product: HessianProduct, samples: int) -> None:
        self.product, self.samples, self.plan = product, samples, product.plan
        blocks = -(-samples // most_together(product.plan))
        self.together = -(-samples // blocks)
        self._schedules = Schedules(product.plan, self._made, self.together)

    def _made(self, plan: Plan, double: Plan) -> ScheduledFunction:
        fn = Curvatures(self.product.loss, plan, count=self.together)
        running = read_running(Policy(prefetch=1), False, self.product.running.compile)
        return ScheduledFunction(fn, plan, double, running, "samples of the trace of a Hessian", False)

    def __repr__(self) -> str:
        return f"<{self.samples} samples of the trace of {self.product!r}>"

    @collective_call
    def __call__(self, params: Any, batch: Any, key: Tensor) -> Tensor:
        """The samples at these parameters, of this rank's batch, ``(samples,)``, equal on all ranks.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        check_arguments(self.plan, params, params, batch)
        found = list[Tensor]()
        for begin in range(0, self.samples, self.together):
            numbers = [min(begin + at, self.samples - 1) for at in range(self.together)]
            signs = [self._signs(key, number) for number in numbers]
            if (made := self._on_schedule(params, signs, batch)) is None:
                return self._by_products(params, batch, key)
            found += made
        return torch.stack(found[: self.samples])

    def _signs(self, key: Tensor, number: int) -> dict[str, Any]:
        return random_trees.rademacher(fold_in(key, number), self.plan)

    def _by_products(self, params: Any, batch: Any, key: Tensor) -> Tensor:
        """The same by Hessian-vector products."""
        product = self.product
        if self.samples == 1 or product.reshard:
            times: Callable[[Any], Any] = lambda v: product(params, v, batch)  # noqa: E731
        else:
            times = product.linearize(params, batch)
        found = []
        for number in range(self.samples):
            signs = self._signs(key, number)
            found.append(tree_vectors.vdot(signs, times(signs), self.plan))
        return torch.stack(found)


def most_together(plan: Plan) -> int:
    """The samples of one run: as many as have room in 128 MiB with their shards, and with three units gathered."""
    trained = [group for group in plan.groups if group.trainable]
    units: dict[str, int] = {}
    for group in trained:
        units[group.unit] = units.get(group.unit, 0) + group.numel * group.compute_dtype.itemsize
    shards = sum(group.chunk * group.dtype.itemsize for group in trained)
    return max(1, KEPT // (shards + 3 * max(units.values(), default=1)))


def hessian_trace_samples(
    loss_fn: LossFn,
    plan: Plan,
    samples: int = 16,
    *,
    reshard: bool | None = None,
    compile: str | None = None,
) -> TraceSamples:
    """Samples whose mean is the trace of the Hessian: ``hessian_trace_samples(loss_fn, plan)(params, batch, key)``.

    Each is ``z @ H z`` of random signs ``z``, an unbiased estimate (Hutchinson 1990). They do not depend on the mesh.
    On a schedule a sample is a second derivative in forward mode, of which no gradient is taken, and one run, which
    gathers parameters once, serves as many samples as have room in 128 MiB: shards, and three units gathered.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        samples: the number of ``z``.
        reshard: as for ``hvp``, whose products are taken where there is no schedule.
        compile: as for ``hvp``.

    Returns:
        The function; ``key`` is one of ``fs.random``, the same on every rank. It returns a tensor ``(samples,)``, equal
        on all ranks: its mean is the estimate, and ``std() / samples ** 0.5`` its error.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> loss = lambda params, batch: (params["w"] * batch).square().sum() / 2
    >>> found = fs.func.hessian_trace_samples(loss, plan, samples=2)
    >>> found({"w": torch.zeros(4)}, torch.tensor([[1.0, 2.0]]), fs.random.key(0))
    tensor([10., 10.])
    """
    if not isinstance(samples, int) or samples < 1:
        raise PlanError(f"hessian_trace_samples(samples={samples!r}): an int >= 1")
    return TraceSamples(hvp(loss_fn, plan, reshard=reshard, compile=compile), samples)
