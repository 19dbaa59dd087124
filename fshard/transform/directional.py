"""``fs.func.jvp``: a loss and its derivative in a direction."""

from typing import Any

from torch import Tensor
from torch.func import grad_and_value
from torch.func import jvp as forward

from fshard import tree
from fshard.runtime.comm import collective_call
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.transform import tree_vectors
from fshard.transform.linearized import plain_attention
from fshard.transform.product_modes import Flat, ProductModes
from fshard.transform.products import loss_of, split_at
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules, check_arguments
from fshard.transform.sharded_loss import LossFn, ShardedLoss
from fshard.transform.slopes import ValueAndSlope
from fshard.transform.tree_vectors import zero_filled


class DirectionalDerivative(MayBeScheduled):
    """``along(params, v, batch) -> (loss, slope)``. Made by ``fs.func.jvp``.

    Attributes:
        loss: the global mean loss as a function of shards.
        plan: the plan.
    """

    def __init__(self, loss: ShardedLoss, running: RunOptions) -> None:
        self.loss, self.plan, self.running, self.modes = loss, loss.plan, running, ProductModes()
        self._schedules = Schedules(loss.plan, self._made)

    def _made(self, plan: Plan, double: Plan) -> ScheduledFunction:
        fn = ValueAndSlope(self.loss, plan)
        return ScheduledFunction(fn, plan, double, self.running, "derivative in a direction", False)

    def __repr__(self) -> str:
        return f"<derivative of {getattr(self.loss.loss_fn, '__name__', 'a function')} in a direction>"

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and its slope at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        check_arguments(self.plan, params, v, batch)
        if (made := self._on_schedule(params, [v], batch)) is not None:
            return made["loss"], made["slope"]
        return self._transformed(params, v, batch)

    def _transformed(self, params: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The same, gathered where units run."""
        trained, rest, direction = split_at(self.plan, params, v)

        def of(p: Flat) -> Tensor:
            value: Tensor = self.loss(tree.nest({**rest, **p}), batch)
            return value

        def reverse() -> tuple[Tensor, Tensor]:
            slopes, value = grad_and_value(of)(trained)
            moved = zero_filled(self.plan, direction, rest)
            return value, tree_vectors.vdot(zero_filled(self.plan, slopes, rest), moved, self.plan)

        with plain_attention():
            found: Any = self.modes.run(lambda: forward(of, (trained,), (direction,)), reverse)
        return found[0], found[1]


def jvp(
    loss_fn: LossFn, plan: Plan, *, reshard: bool | None = None, compile: str | None = None
) -> DirectionalDerivative:
    """The loss and its derivative in a direction: ``jvp(loss_fn, plan)(params, v, batch) -> (loss, slope)``.

    One forward pass with forward-mode derivatives (``jax.jvp``), on a schedule as an evaluation; a gradient where an
    operator has none.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        reshard: as for ``hvp``; on a schedule there is nothing to gather again.
        compile: as for ``hvp``.

    Returns:
        The function. ``v`` is a tree of shards like ``params``; its values for frozen leaves are ignored.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> along = fs.func.jvp(lambda params, batch: (batch @ params["w"]).sum(), plan)
    >>> along({"w": w.flatten()}, {"w": torch.ones(4)}, torch.ones(1, 2))
    (tensor(10.), tensor(4.))
    """
    return DirectionalDerivative(loss_of(loss_fn, plan, reshard), read_running(Policy(), False, compile))
