"""``fs.func.gnvp``: products with Gauss-Newton matrices, which are never formed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.func import jvp as forward

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.linear import LinearSum, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import bind, cutting
from fshard.model.remat_function import exact
from fshard.runtime.comm import collective_call
from fshard.runtime.engine import read_loss
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.equal import Equal
from fshard.transform.curved_units import data_of
from fshard.transform.gather import gather_some
from fshard.transform.linearized import Linearize, LinearMap, keeps, met, own_storage, plain_attention
from fshard.transform.meeting import meeting
from fshard.transform.product_modes import Flat, ProductModes, direction_of
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules, check_arguments
from fshard.transform.sharded_loss import LossFn
from fshard.transform.slopes import CurvedOutputs
from fshard.transform.tree_vectors import zero_filled


class GaussNewtonProduct(MayBeScheduled):
    """``product(params, v, batch)``. Made by ``fs.func.gnvp``.

    Attributes:
        predict: the outputs as a function of parameters.
        loss_fn: the loss as a function of outputs.
        plan: the plan.
    """

    def __init__(self, predict: Callable[..., Any], loss_fn: LossFn, plan: Plan, running: RunOptions) -> None:
        self.predict, self.loss_fn, self.plan, self.running = predict, loss_fn, plan, running
        self.pushing, self.bending = ProductModes(), ProductModes()
        self._schedules = Schedules(plan, self._made)

    def _made(self, plan: Plan, double: Plan) -> ScheduledFunction:
        fn = CurvedOutputs(self.predict, self._bent, plan)
        return ScheduledFunction(fn, plan, double, self.running, "Gauss-Newton product", True)

    def __repr__(self) -> str:
        return f"<Gauss-Newton product of {getattr(self.predict, '__name__', 'a function')}>"

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
        """
        check_arguments(self.plan, params, v, batch)
        if (made := self._on_schedule(params, [v], batch)) is not None:
            found: dict[str, Any] = made
            return found
        return self._transformed(params, v, batch)

    def _transformed(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The same, gathered at once."""
        ranks = meeting(self.plan.mesh, batch, BatchRows(), params)
        trained, rest = met(ranks, self.plan, params, batch, Equal(self.plan, {"tool": "gnvp"}), v)
        direction = direction_of(self.plan, trained, v)

        with cutting(self.plan.mesh), plain_attention():
            found: Any = vjp(lambda p: gather_some(self.plan, p, True), trained)
            at, along = own_storage(found[0]), gather_some(self.plan, direction, True)
            fixed = gather_some(self.plan, rest, False)

            def outputs(p: Flat) -> Any:
                with exact(), bind(self.plan.mesh, self.plan.data_axes):
                    return self.predict(tree.nest({path: {**fixed, **p}[path] for path in self.plan.leaves}), batch)

            def times() -> Flat:
                pushed: Any = self.pushing.run(
                    lambda: forward(outputs, (at,), (along,)), lambda: _pushed(outputs, at, along)
                )
                product: tuple[Flat] = vjp(outputs, at)[1](self._curved(batch, pushed[0], pushed[1]))
                return product[0]

            pulled = ranks.all_ranks("the product", times)
            return zero_filled(self.plan, found[1](pulled)[0], rest)

    @collective_call
    def linearize(self, params: Any, batch: Any) -> LinearMap:
        """The Gauss-Newton matrix at these parameters as a linear map, whose ``value`` is this rank's outputs.

        The outputs are computed once, and parameters are gathered once. The map holds them, and activations, as long as
        it lives.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
            PeerError: ``predict`` raised on another rank.
        """
        jacobian = Linearize(self.predict, self.plan, False)(params, batch)

        def times(v: Flat) -> Flat:
            with plain_attention():
                return jacobian.backward(self._curved(batch, jacobian.value, jacobian.forward(v)))

        def filled(v: Flat) -> dict[str, Any]:
            return zero_filled(self.plan, times(v), jacobian.frozen)

        def trainable(u: Any) -> Flat:
            flat = self.plan.check_tree(u, whole=False, what="u")
            return {path: leaf for path, leaf in flat.items() if path not in jacobian.frozen}

        return LinearMap(self.plan, jacobian.value, filled, times, jacobian.frozen, trainable)

    def _curved(self, batch: Any, out: Any, moved: Any) -> Any:
        """The Hessian of the loss by outputs, times a derivative of the outputs."""
        slope = grad(functools.partial(self._share, batch))
        return self.bending.run(lambda: forward(slope, (out,), (moved,))[1], lambda: vjp(slope, out)[1](moved)[0])

    def _bent(self, batch: Any, out: Any, moved: Any) -> tuple[Any, Any]:
        """The Hessian of this rank's total loss by outputs, times a derivative of the outputs; and the loss's count."""
        count: list[Any] = []

        def total(out: Any) -> Tensor:
            with exact():
                loss = read_loss(self.loss_fn(out, batch))
            count[:] = [loss.count]
            return loss.total

        slope = grad(total)
        found = self.bending.run(lambda: forward(slope, (out,), (moved,))[1], lambda: vjp(slope, out)[1](moved)[0])
        return found, data_of(count[0]).detach() if isinstance(count[0], Tensor) else count[0]

    def _share(self, batch: Any, out: Any) -> Tensor:
        """This rank's part of the mean."""
        with exact(), bind(self.plan.mesh, self.plan.data_axes):
            loss = read_loss(self.loss_fn(out, batch))
        count = torch.as_tensor(1.0 if loss.count is None else loss.count, device=loss.total.device)
        count = count.detach().to(loss.total)
        data = Ranks(self.plan.mesh, self.plan.data_axes)
        return loss.total / (apply(count, LinearSum(data)) if data.size > 1 else count)


def gnvp(
    predict: Callable[..., Any],
    loss_fn: LossFn,
    plan: Plan,
    *,
    schedule: Policy | Auto | str | None = None,
    compile: str | None = None,
) -> GaussNewtonProduct:
    """The generalized Gauss-Newton matrix times a vector: ``gnvp(predict, loss_fn, plan)(params, v, batch)``.

    The matrix is ``J^T H J``, where ``J`` is the Jacobian of the outputs and ``H`` the Hessian of the loss by them
    (Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002). For a softmax with
    cross entropy it is the Fisher matrix, and it is positive semi-definite for any convex loss. For many products at
    one point, ``gnvp(predict, loss_fn, plan).linearize(params, batch)`` is a function of ``v``. ``hvp``
    tells of dropout.

    Args:
        predict: ``predict(params, batch)``, this rank's outputs: any pytree of floating tensors.
        loss_fn: ``loss_fn(outputs, batch)``, a scalar or an ``fs.Mean``.
        plan: the plan.
        schedule: as for ``hvp``. None keeps gathered parameters and their tangents of models whose parameters take up
            to 128 MiB, and gathers them again otherwise; the attribute ``schedule`` of the function tells.
        compile: as for ``hvp``.

    Returns:
        The function. ``v`` and the product are trees of shards like ``params``, zero for frozen leaves.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> loss = lambda out, batch: out.square().sum() / 2
    >>> product = fs.func.gnvp(lambda params, batch: batch @ params["w"], loss, plan)
    >>> product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    {'w': tensor([3., 3., 6., 6.])}
    """
    wants: list[Want] = [
        ("predict", predict, Callable, "a function predict(params, batch)"),
        ("loss_fn", loss_fn, Callable, "a function loss_fn(outputs, batch)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("fs.func.gnvp(predict, loss_fn, plan)", wants)
    refuse_stages("fs.func.gnvp(predict, loss_fn, plan)", plan)
    chosen = Policy(reshard=not keeps(plan)) if schedule is None else schedule
    return GaussNewtonProduct(predict, loss_fn, plan, read_running(chosen, False, compile))


def _pushed(f: Callable[[Flat], Any], at: Flat, direction: Flat) -> tuple[Any, Any]:
    """A function's value and its derivative in a direction, by reverse derivatives."""
    out, pull = vjp(f, at)[:2]
    return out, vjp(lambda cotangents: pull(cotangents)[0], tree.mapped(torch.zeros_like, out))[1](direction)[0]
