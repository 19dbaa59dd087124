"""Products with Hessians, which are never formed.

Forward derivatives are faster. Where an operator has none, reverse derivatives give the same product: the Hessian is
symmetric, and the pullback of a pullback is the pushforward.
"""

import functools
from typing import Any

from torch import Tensor
from torch.func import grad, vjp
from torch.func import jvp as forward

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.scope import cutting
from fshard.errors import PlanError
from fshard.model.model_refusals import explained
from fshard.runtime.comm import collective_call
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.transform.gather import gather_some
from fshard.transform.linearized import LinearMap, keeps, met, own_storage, plain_attention
from fshard.transform.meeting import meeting
from fshard.transform.product_modes import Flat, ProductModes, direction_of
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules, check_arguments
from fshard.transform.sharded_loss import GatheredLoss, LossFn, ShardedLoss, check_loss
from fshard.transform.slopes import Slope
from fshard.transform.tree_vectors import split_trainable, zero_filled

CALL = "Hessian-vector product"
"""The name of the call, by which ranks compare their calls."""


class HessianProduct(MayBeScheduled):
    """``product(params, v, batch)``. Made by ``fs.func.hvp``.

    Attributes:
        loss: the global mean loss as a function of shards.
        plan: the plan.

    >>> import fshard as fs, torch
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = fs.func.hvp(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan)
    >>> _ = product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    >>> product.record == product.schedule.ops
    True
    """

    def __init__(self, loss: ShardedLoss, running: RunOptions) -> None:
        self.loss, self.running, self.modes = loss, running, ProductModes()
        self._schedules = Schedules(loss.plan, self._made)

    def _made(self, plan: Plan, double: Plan) -> ScheduledFunction:
        return ScheduledFunction(Slope(self.loss, plan), plan, double, self.running, CALL, True)

    def __repr__(self) -> str:
        return f"<Hessian-vector product of {getattr(self.loss.loss_fn, '__name__', 'a function')}>"

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan."""
        return self.loss.plan

    @property
    def reshard(self) -> bool:
        """True where units are gathered again in each pass."""
        return self.loss.reshard

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        check_arguments(self.plan, params, v, batch)
        if (made := self._on_schedule(params, [v], batch)) is not None:
            found: dict[str, Any] = made
            return found
        if not self.reshard:
            return self._kept(params, v, batch)
        trained, rest, direction = split_at(self.plan, params, v)
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
    loss_fn: LossFn,
    plan: Plan,
    *,
    reshard: bool | None = None,
    schedule: Policy | Auto | str | None = None,
    compile: str | None = None,
) -> HessianProduct:
    """The Hessian of the global mean loss times a vector: ``hvp(loss_fn, plan)(params, v, batch)``.

    The gradient of the loss's derivative along ``v``, which is computed by forward differentiation (Pearlmutter, "Fast
    exact multiplication by the Hessian", 1994): about the time of three gradients, on a schedule as a train step. Where
    an operator has no forward derivative, it is reverse over reverse. In a function that ``fs.make_step`` runs, a
    product is a pass of that step. For many products at one point, ``hvp(loss_fn, plan).linearize(params, batch)`` is a
    function of ``v`` that computes the gradient once.

    ``nn.Dropout`` draws a mask for each product, as for each call in PyTorch, also in a step: such products are of
    different matrices. ``linearize`` draws one; ``fs.random`` with a key in the batch gives all products the same.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        reshard: free a unit's parameters and their tangents after its forward, and gather them again for its backward.
            False keeps them. None chooses False for models whose parameters take up to 128 MiB; the attribute
            ``reshard`` of the function tells the choice, and so does its ``schedule``. Products are equal, up to the
            order of float sums. Where a product has no schedule, True gathers and computes units again in each pass.
        schedule: as for ``fs.make_train_step``, in the place of ``reshard``: a policy, or ``fs.Auto(memory=...)``.
        compile: as for ``fs.make_train_step``, of the graphs of a unit and its tangents together, which products on a
            schedule run: ``print(product.units)``.

    Returns:
        The function. ``v`` and the product are trees of shards like ``params``, zero for frozen leaves.

    Raises:
        PlanError: invalid arguments.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = fs.func.hvp(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan)
    >>> product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    {'w': tensor([1., 4., 1., 4.])}
    >>> hessian = product.linearize({"w": torch.zeros(4)}, torch.tensor([[1.0, 2.0]]))
    >>> hessian({"w": torch.ones(4)}), product.reshard
    ({'w': tensor([1., 4., 1., 4.])}, False)
    >>> product.schedule.policy.reshard
    False
    """
    loss = loss_of(loss_fn, plan, _resharded(reshard, schedule))
    return HessianProduct(
        loss, read_running(Policy(reshard=loss.reshard) if schedule is None else schedule, False, compile)
    )


def loss_of(loss_fn: LossFn, plan: Plan, reshard: bool | None) -> ShardedLoss:
    """The global mean loss; without a choice, models of few bytes stay gathered."""
    check_loss(loss_fn, plan)
    expect("(loss_fn, plan, reshard=)", [("reshard", reshard, (bool, type(None)), "True, False or None")])
    return ShardedLoss(loss_fn, plan, False, not keeps(plan) if reshard is None else reshard, False)


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


def split_at(plan: Plan, params: Any, v: Any) -> tuple[Flat, Flat, Flat]:
    """The differentiated leaves, the other leaves, and the direction of the former."""
    trained, rest = split_trainable(plan, params)
    return own_storage(trained), rest, direction_of(plan, trained, v)
