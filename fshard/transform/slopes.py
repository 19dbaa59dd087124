"""Derivatives of a loss along directions, as functions that run on schedules.

A loss's slope along a direction is a function of parameters and of their tangents, of which no gradient is taken. Its
gradient is a Hessian-vector product: that of a loss of twice the groups, half of them frozen. So a product runs as a
gradient does, gathered ahead, with reductions in flight, and the gradient of the loss itself, which nobody reads, is
never added up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from fshard import tree
from fshard.model.precision import make_casting
from fshard.model.unit import Unit
from fshard.runtime.engine import Mean, read_loss
from fshard.sharding.plan import Plan
from fshard.transform.curved_units import CurvedUnits, data_of
from fshard.transform.dual_units import DualUnits, TransformedUnits
from fshard.transform.linearized import plain_attention
from fshard.transform.sharded_loss import ShardedLoss
from fshard.transform.tangent_plan import pairs


@dataclass(frozen=True, eq=False)
class TangentFunction:
    """A loss under forward derivatives.

    Attributes:
        plan: the plan without tangents.
        known: units made so far.
    """

    loss: ShardedLoss
    plan: Plan
    known: dict[Any, Unit] = field(default_factory=dict, repr=False)

    def total(self, units: TransformedUnits, batch: Any, count: list[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The total of the loss, and its count if that is a tensor. It goes to ``count`` if it is none."""
        with units:
            found = read_loss(self.loss.loss_fn(params_of(self.plan, units), batch))
        self.loss.refuse_aux(found.aux)
        count[:] = [found.count]
        return found.total, (found.count,) if isinstance(found.count, Tensor) else ()

    def zero(self) -> Tensor:
        """A scalar to differentiate by: what moves are the leaves."""
        return zero_on(self.plan)


@dataclass(frozen=True, eq=False)
class Slope(TangentFunction):
    """A loss's derivative along a direction, as a loss function of a plan with tangents."""

    def __call__(self, params: Any, batch: Any) -> Any:
        """The derivative, an ``fs.Mean`` if the loss is one."""
        return self._both(params, batch)[0]

    def _both(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The derivative, and the loss without a graph."""
        count: list[Any] = []

        def of(_: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.total(DualUnits(pairs(self.plan, params), self.known), batch, count)

        with plain_attention():
            value, slope, counts = jvp(of, (self.zero(),), (self.zero(),), has_aux=True)  # type: ignore[misc]
        weight = counts[0] if counts else count[0]
        return mean_like(slope, weight), mean_like(value.detach(), weight)


@dataclass(frozen=True, eq=False)
class SlopeBesideLoss(Slope):
    """A loss's derivative along a direction as a loss function, with the loss as an auxiliary value."""

    def __call__(self, params: Any, batch: Any) -> Any:
        """The derivative and the loss, as ``fs.Mean`` if the loss is one."""
        slope, value = self._both(params, batch)
        return slope, {"loss": value}


@dataclass(frozen=True, eq=False)
class ValueAndSlope(TangentFunction):
    """A loss and its derivative along a direction, as a function that is evaluated."""

    def __call__(self, params: Any, batch: Any) -> dict[str, Any]:
        """Both, as ``fs.Mean`` if the loss is one."""
        count: list[Any] = []

        def of(_: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.total(DualUnits(pairs(self.plan, params), self.known, recorded=False), batch, count)

        with plain_attention():
            value, slope, counts = jvp(of, (self.zero(),), (self.zero(),), has_aux=True)  # type: ignore[misc]
        weight = counts[0] if counts else count[0]
        return {"loss": mean_like(value, weight), "slope": mean_like(slope, weight)}


@dataclass(frozen=True, eq=False)
class Curvatures(TangentFunction):
    """A loss's second derivatives along directions, as a function that is evaluated.

    One run serves all directions, so parameters are gathered, and the loss is computed, once.

    Attributes:
        count: the number of directions.
    """

    count: int = 1

    def __call__(self, params: Any, batch: Any) -> list[Any]:
        """The derivatives, as ``fs.Mean`` if the loss is one."""
        weight: list[Any] = []

        def of(_: Tensor) -> Tensor:
            units = CurvedUnits(pairs(self.plan, params, self.count), self.known, self.count)
            found, counts = self.total(units, batch, weight)
            weight[:] = [data_of(x).detach() for x in counts] or weight
            return found

        def along(_: Tensor) -> Tensor:
            zero = self.zero()
            slope: Callable[[Tensor], Tensor] = lambda e: jvp(of, (e,), (zero,))[1]  # noqa: E731
            found: Any = jvp(slope, (zero,), (zero,))
            second: Tensor = found[1]
            return second

        with plain_attention():
            found = torch.vmap(along)(self.zero().expand(self.count))
        return [mean_like(x, weight[0]) for x in found.unbind()]


@dataclass(frozen=True, eq=False)
class CurvedOutputs:
    """A scalar of a plan with tangents whose gradient is a Gauss-Newton product.

    It is the inner product of the outputs with a constant: the Hessian of the loss by them, times their derivative
    along the direction. So no gradient flows through tangents.

    Attributes:
        predict: the outputs as a function of parameters and a batch.
        bend: the constant, of the batch, the outputs and their derivative; and the count of the loss.
        plan: the plan without tangents.
        known: units made so far.
    """

    predict: Callable[[Any, Any], Any]
    bend: Callable[[Any, Any, Any], tuple[Any, Any]]
    plan: Plan
    known: dict[Any, Unit] = field(default_factory=dict, repr=False)

    def __call__(self, params: Any, batch: Any) -> Any:
        """The scalar, an ``fs.Mean`` if the loss is one."""
        structure: list[Any] = []

        def of(_: Tensor) -> tuple[Tensor, ...]:
            with DualUnits(pairs(self.plan, params), self.known, recorded=False) as units:
                leaves, spec = tree.flatten(self.predict(params_of(self.plan, units), batch))
            structure[:] = [spec]
            return tuple(leaves)

        zero = zero_on(self.plan)
        with plain_attention():
            found: Any = jvp(of, (zero,), (zero,))
            out, moved = [tree.unflatten(structure[0], [x.detach() for x in one]) for one in found]
            bent, count = self.bend(batch, out, moved)
        parts = [(x * w).sum() for x, w in zip(found[0], tree.leaves(bent), strict=True)]
        return mean_like(torch.stack(parts).sum(), count)


def params_of(plan: Plan, units: TransformedUnits) -> Any:
    """The parameter tree of a function whose units run there."""
    casting = make_casting(plan.precision, {path: leaf.precision for path, leaf in plan.leaves.items()})
    return tree.nest(units.handles({path: leaf.shape for path, leaf in plan.leaves.items()}, casting))


def zero_on(plan: Plan) -> Tensor:
    """A scalar zero."""
    return torch.zeros((), device=plan.mesh.device)


def mean_like(value: Tensor, count: Any) -> Any:
    """A part of a mean with this count; None for a plain number."""
    return value if count is None else Mean(value, count)
