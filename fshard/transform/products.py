"""Products with derivatives: directions, Hessians, traces. No matrix is ever formed.

Forward derivatives are faster. Where an operator has none, reverse derivatives give the same product: the Hessian is
symmetric, and the pullback of a pullback is the pushforward.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp
from torch.func import jvp as forward

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.scope import cutting
from fshard.errors import PlanError
from fshard.model.missing import explained
from fshard.model.random import fold_in
from fshard.runtime.comm import collective_call, telling
from fshard.runtime.steps import Runner
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.training.latest import OneFunction
from fshard.transform import tree_vectors
from fshard.transform.gather import gather_some
from fshard.transform.linearized import LinearMap, keeps, met, own_storage, plain_attention
from fshard.transform.meeting import meeting
from fshard.transform.product_modes import Flat, ProductModes, direction_of
from fshard.transform.scheduled_products import ProductSchedules, check_arguments
from fshard.transform.sharded_loss import GatheredLoss, LossFn, ShardedLoss, check_loss, sharded_loss
from fshard.transform.tree_vectors import split_trainable, zero_filled


def jvp(
    loss_fn: LossFn, plan: Plan, *, reshard: bool | None = None
) -> Callable[[Any, Any, Any], tuple[Tensor, Tensor]]:
    """The loss and its derivative in a direction: ``jvp(loss_fn, plan)(params, v, batch) -> (loss, slope)``.

    One forward pass with forward-mode derivatives (``jax.jvp``); a gradient where an operator has none.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        reshard: as for ``hvp``.

    Returns:
        The function. ``v`` is a tree of shards like ``params``; its values for frozen leaves are ignored.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> along = jvp(lambda params, batch: (batch @ params["w"]).sum(), plan)
    >>> along({"w": w.flatten()}, {"w": torch.ones(4)}, torch.ones(1, 2))
    (tensor(10.), tensor(4.))
    """
    f, modes = _loss(loss_fn, plan, reshard), ProductModes()

    @telling(plan.mesh, always=False)
    def along(params: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        trained, rest, direction = _split(plan, params, v)

        def of(p: Flat) -> Tensor:
            value: Tensor = f(tree.nest({**rest, **p}), batch)
            return value

        def reverse() -> tuple[Tensor, Tensor]:
            slopes, value = grad_and_value(of)(trained)
            return value, tree_vectors.vdot(zero_filled(plan, slopes, rest), zero_filled(plan, direction, rest), plan)

        with plain_attention():
            found: Any = modes.run(lambda: forward(of, (trained,), (direction,)), reverse)
        return found[0], found[1]

    return along


class HessianProduct(OneFunction):
    """``product(params, v, batch)``. Made by ``fs.func.hvp``.

    Attributes:
        loss: the global mean loss as a function of shards.
        plan: the plan.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = fs.func.hvp(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan)
    >>> _ = product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    >>> product.record == product.schedule.ops
    True
    """

    def __init__(self, loss: ShardedLoss, running: RunOptions) -> None:
        self.loss, self.running, self.modes = loss, running, ProductModes()
        self._schedules, self._unscheduled = ProductSchedules(loss, running), ""

    def __repr__(self) -> str:
        return f"<Hessian-vector product of {getattr(self.loss.loss_fn, '__name__', 'a function')}>"

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.loss.plan

    @property
    def reshard(self) -> bool:
        """True where units are gathered again in each pass."""
        return self.loss.reshard

    @property
    def _runner(self) -> Runner:  # type: ignore[override]
        found = self._schedules.here
        if self._unscheduled or found is None:
            reason = self._unscheduled or "parameters lie in host memory, or a leaf is named like another one's tangent"
            raise PlanError(
                f"no schedule: the latest product was gathered where its units run, as transforms are, since {reason}"
            )
        return found.runner

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        check_arguments(self.plan, params, v, batch)
        scheduled, self._unscheduled = self._schedules.find(params, v, batch)
        if scheduled is not None:
            return scheduled(params, v, batch)
        if not self.reshard:
            return self._kept(params, v, batch)
        trained, rest, direction = _split(self.plan, params, v)
        return zero_filled(self.plan, self._moved(self.loss, trained, direction, rest, batch), rest)

    def _kept(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product of gathered leaves: of the two gradients that it makes, only its own is added up over ranks."""
        plan, ranks = self.plan, meeting(self.plan.mesh, batch, BatchRows(), params)
        trained, rest = met(ranks, plan, params, batch, Equal(plan, {"tool": "hvp"}), v)
        loss = GatheredLoss(self.loss.loss_fn, plan, False, False, False)
        with cutting(plan.mesh):
            found: Any = vjp(lambda p: gather_some(plan, p, True), trained)
            along = gather_some(plan, direction_of(plan, trained, v), True)
            moved = self._moved(loss, own_storage(found[0]), along, gather_some(plan, rest, False), batch)
            return zero_filled(plan, found[1](moved)[0], rest)

    def _moved(self, loss: ShardedLoss, at: Flat, along: Flat, rest: Flat, batch: Any) -> Flat:
        """The derivative of the gradient by some leaves, along a direction of these."""

        def of(some: Flat) -> Tensor:
            value: Tensor = loss(tree.nest({**rest, **some}), batch)
            return value

        gradient = grad(of)
        with plain_attention():
            found: Flat = self.modes.run(
                lambda: forward(gradient, (at,), (along,))[1], lambda: vjp(gradient, at)[1](along)[0]
            )
        return found

    @collective_call
    def linearize(self, params: Any, batch: Any) -> LinearMap:
        """The Hessian at these parameters as a linear map, whose ``value`` is the gradient.

        The loss and its gradient are computed once; a product takes two thirds of the time of one from the start.
        Without resharding, the parameters are gathered once too. The map holds what it needs, the activations of both
        passes, as long as it lives.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        trained, rest = split_trainable(self.plan, params)
        with plain_attention(), explained("the function"):
            found: Any = vjp(grad(functools.partial(self._of, rest, batch)), own_storage(trained))
        value, pulled = tree.mapped(Tensor.detach, found[0]), found[1]

        def times(v: Flat) -> Flat:  # the matrix is symmetric, so its transpose is no further derivative
            moved: Flat = pulled(v)[0]
            return moved

        def filled(v: Flat) -> dict[str, Any]:
            return zero_filled(self.plan, times(v), rest)

        def trainable(u: Any) -> Flat:
            flat = self.plan.check_tree(u, whole=False, what="u")
            return {path: flat[path] for path in value}

        return LinearMap(self.plan, zero_filled(self.plan, value, rest), filled, times, rest, trainable)

    def _of(self, rest: Flat, batch: Any, trained: Flat) -> Tensor:
        value: Tensor = self.loss(tree.nest({**rest, **trained}), batch)
        return value


def hvp(
    loss_fn: LossFn, plan: Plan, *, reshard: bool | None = None, schedule: Policy | Auto | str | None = None
) -> HessianProduct:
    """The Hessian of the global mean loss times a vector: ``hvp(loss_fn, plan)(params, v, batch)``.

    The gradient of the loss's derivative along ``v``, which is computed by forward differentiation (Pearlmutter, "Fast
    exact multiplication by the Hessian", 1994): about the time of three gradients, on a schedule as a train step. Where
    an operator has no forward derivative, it is reverse over reverse. For many products at one point,
    ``hvp(loss_fn, plan).linearize(params, batch)`` is a function of ``v`` that computes the gradient once.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        reshard: free a unit's parameters and their tangents after its forward, and gather them again for its backward.
            False keeps them. None chooses False for models whose parameters take up to 128 MiB; the attribute
            ``reshard`` of the function tells the choice, and so does its ``schedule``. Products are equal, up to the
            order of float sums. Where a product has no schedule, True gathers and computes units again in each pass.
        schedule: as for ``fs.make_train_step``, in the place of ``reshard``: a policy, or ``fs.Auto(memory=...)``.

    Returns:
        The function. ``v`` and the product are trees of shards like ``params``, zero for frozen leaves.

    Raises:
        PlanError: invalid arguments.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = hvp(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan)
    >>> product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    {'w': tensor([1., 4., 1., 4.])}
    >>> hessian = product.linearize({"w": torch.zeros(4)}, torch.tensor([[1.0, 2.0]]))
    >>> hessian({"w": torch.ones(4)}), product.reshard
    ({'w': tensor([1., 4., 1., 4.])}, False)
    >>> product.schedule.policy.reshard
    False
    """
    loss = _loss(loss_fn, plan, _resharded(reshard, schedule))
    return HessianProduct(loss, read_running(Policy(reshard=loss.reshard) if schedule is None else schedule, False))


def hessian_trace_samples(
    loss_fn: LossFn, plan: Plan, samples: int = 16, *, reshard: bool | None = None
) -> Callable[[Any, Any, Tensor], Tensor]:
    """Samples whose mean is the trace of the Hessian: ``hessian_trace_samples(loss_fn, plan)(params, batch, key)``.

    Each is ``z @ H z`` of random signs ``z``, an unbiased estimate (Hutchinson 1990). They do not depend on the mesh.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        samples: the number of ``z``, each one Hessian-vector product.
        reshard: as for ``hvp``. Without resharding, the loss and its gradient are computed once for all samples.

    Returns:
        The function; ``key`` is one of ``fs.random``, the same on every rank. It returns a tensor ``(samples,)``, equal
        on all ranks: its mean is the estimate, and ``std() / samples ** 0.5`` its error.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> found = hessian_trace_samples(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan, samples=2)
    >>> found({"w": torch.zeros(4)}, torch.tensor([[1.0, 2.0]]), fs.random.key(0))
    tensor([10., 10.])
    """
    if not isinstance(samples, int) or samples < 1:
        raise PlanError(f"hessian_trace_samples(samples={samples!r}): an int >= 1")
    product = hvp(loss_fn, plan, reshard=reshard)

    @telling(plan.mesh, always=False)
    def probes(params: Any, batch: Any, key: Tensor) -> Tensor:
        if samples == 1 or product.reshard:
            times: Callable[[Any], Any] = lambda v: product(params, v, batch)  # noqa: E731
        else:
            times = product.linearize(params, batch)
        found = []
        for number in range(samples):
            signs = tree_vectors.rademacher(fold_in(key, number), plan)
            found.append(tree_vectors.vdot(signs, times(signs), plan))
        return torch.stack(found)

    return probes


def _loss(loss_fn: LossFn, plan: Plan, reshard: bool | None) -> ShardedLoss:
    """The global mean loss; without a choice, models of few bytes stay gathered."""
    check_loss(loss_fn, plan)
    expect("(loss_fn, plan, reshard=)", [("reshard", reshard, (bool, type(None)), "True, False or None")])
    return sharded_loss(loss_fn, plan, reshard=not keeps(plan) if reshard is None else reshard)


def _resharded(reshard: bool | None, schedule: Any) -> bool | None:
    """Return ``reshard`` of a loss whose products run on a schedule."""
    if schedule is None:
        return reshard
    if reshard is not None:
        raise PlanError(
            f"hvp(reshard={reshard!r}, schedule={schedule!r}): a schedule says itself what it keeps: give one of them"
        )
    policy = read_running(schedule, False).policy
    return isinstance(policy, Auto) or policy.reshard is not False


def _split(plan: Plan, params: Any, v: Any) -> tuple[Flat, Flat, Flat]:
    """The differentiated leaves, the other leaves, and the direction of the former."""
    trained, rest = split_trainable(plan, params)
    return own_storage(trained), rest, direction_of(plan, trained, v)
