"""Products with derivatives: directions, Hessians, Gauss-Newton matrices, traces. No matrix is ever formed.

Forward derivatives are faster. Where an operator has none, reverse derivatives give the same product: the Hessian is
symmetric, and the pullback of a pullback is the pushforward.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp
from torch.func import jvp as forward

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.linear import LinearSum, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import cutting
from fshard.errors import PlanError
from fshard.model.missing import NO_FORWARD, explained
from fshard.model.random import fold_in
from fshard.model.remat_function import exact
from fshard.runtime.comm import collective_call, telling
from fshard.runtime.engine import read_loss
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.transform import tree_vectors
from fshard.transform.gather import gather_all
from fshard.transform.linearized import Linearize, LinearMap, keeps, met, own_storage, plain_attention
from fshard.transform.meeting import meeting
from fshard.transform.sharded_loss import LossFn, ShardedLoss, check_loss, sharded_loss
from fshard.transform.tree_vectors import split_trainable, zero_filled

Flat = dict[str, Tensor]


@dataclass(frozen=True)
class ProductModes:
    """Two modes of one product: forward derivatives, until an operator turns out to have none; then reverse ones."""

    missing: list[str] = field(default_factory=list)

    def run(self, by_forward: Callable[[], Any], by_reverse: Callable[[], Any]) -> Any:
        """The product. All ranks run one program, so they find the same operators."""
        if not self.missing:
            try:
                with explained("the function"):
                    return by_forward()
            except RuntimeError as error:
                text = str(error)
                if not any(part in text for part in _NO_FORWARD):
                    raise
                self.missing.append(text)
        with explained("the function"):
            return by_reverse()


_NO_FORWARD = (NO_FORWARD, "forward AD", "forward mode AD", "ZeroTensors are immutable", "jvp")
"""Parts of errors about missing forward derivatives."""


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


@dataclass(frozen=True)
class HessianProduct:
    """``product(params, v, batch)``. Made by ``fs.func.hvp``.

    Attributes:
        loss: the global mean loss as a function of shards.
    """

    loss: ShardedLoss
    modes: ProductModes = field(default_factory=ProductModes, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.loss.plan

    @property
    def reshard(self) -> bool:
        """Whether units are gathered, and computed, again in each pass."""
        return self.loss.reshard

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            PeerError: the loss function raised on another rank.
        """
        trained, rest, direction = _split(self.plan, params, v)
        gradient = grad(functools.partial(self._of, rest, batch))
        with plain_attention():
            moved: Flat = self.modes.run(
                lambda: forward(gradient, (trained,), (direction,))[1],
                lambda: vjp(gradient, trained)[1](direction)[0],
            )
        return zero_filled(self.plan, moved, rest)

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


def hvp(loss_fn: LossFn, plan: Plan, *, reshard: bool | None = None) -> HessianProduct:
    """The Hessian of the global mean loss times a vector: ``hvp(loss_fn, plan)(params, v, batch)``.

    Forward over reverse (Pearlmutter, "Fast exact multiplication by the Hessian", 1994) takes about the time of two
    gradients. From the first call that finds an operator of the gradient without forward derivative, it is reverse
    over reverse. For many products at one point, ``hvp(loss_fn, plan).linearize(params, batch)`` is a function of ``v``
    that computes the gradient once.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        reshard: gather a unit's parameters where it runs, in each pass, and compute the unit again, as
            ``fs.func.sharded_loss`` does. False gathers all parameters once, and holds them, their direction and their
            gradients whole. None chooses False for models whose parameters take up to 128 MiB; the attribute
            ``reshard`` of the function tells the choice. Products are equal, up to the order of float sums.

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
    """
    return HessianProduct(_loss(loss_fn, plan, reshard))


@dataclass(frozen=True)
class GaussNewtonProduct:
    """``product(params, v, batch)``. Made by ``fs.func.gnvp``."""

    predict: Callable[..., Any]
    loss_fn: LossFn
    plan: Plan
    pushing: ProductModes = field(default_factory=ProductModes, repr=False)
    bending: ProductModes = field(default_factory=ProductModes, repr=False)

    @collective_call
    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product at these parameters, of this rank's batch.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
        """
        ranks = meeting(self.plan.mesh, batch, BatchRows())
        trained, rest = met(ranks, self.plan, params, batch, Equal(self.plan, {"tool": "gnvp"}), v)
        direction = _direction(self.plan, trained, v)

        def outputs(p: Flat) -> Any:
            with exact():
                return self.predict(gather_all(self.plan, {**rest, **p}), batch)

        with cutting(self.plan.mesh), plain_attention():
            found: Any = self.pushing.run(
                lambda: forward(outputs, (trained,), (direction,)), lambda: _pushed(outputs, trained, direction)
            )
            (pulled,) = vjp(outputs, trained)[1](self._curved(batch, found[0], found[1]))
        return zero_filled(self.plan, pulled, rest)

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

    def _share(self, batch: Any, out: Any) -> Tensor:
        """This rank's part of the mean."""
        with exact():
            loss = read_loss(self.loss_fn(out, batch))
        count = torch.as_tensor(1.0 if loss.count is None else loss.count, device=loss.total.device)
        count = count.detach().to(loss.total)
        data = Ranks(self.plan.mesh, self.plan.data_axes)
        return loss.total / (apply(count, LinearSum(data)) if data.size > 1 else count)


def gnvp(predict: Callable[..., Any], loss_fn: LossFn, plan: Plan) -> GaussNewtonProduct:
    """The generalized Gauss-Newton matrix times a vector: ``gnvp(predict, loss_fn, plan)(params, v, batch)``.

    The matrix is ``J^T H J``, where ``J`` is the Jacobian of the outputs and ``H`` the Hessian of the loss by them
    (Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002). For a softmax with
    cross entropy it is the Fisher matrix, and it is positive semi-definite for any convex loss. For many products at
    one point, ``gnvp(predict, loss_fn, plan).linearize(params, batch)`` is a function of ``v``.

    Args:
        predict: ``predict(params, batch)``, this rank's outputs: any pytree of floating tensors.
        loss_fn: ``loss_fn(outputs, batch)``, a scalar or an ``fs.Mean``.
        plan: the plan.

    Returns:
        The function. ``v`` and the product are trees of shards like ``params``, zero for frozen leaves.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = gnvp(lambda params, batch: batch @ params["w"], lambda out, batch: out.square().sum() / 2, plan)
    >>> product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    {'w': tensor([3., 3., 6., 6.])}
    """
    return GaussNewtonProduct(predict, loss_fn, plan)


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


def _pushed(f: Callable[[Flat], Any], at: Flat, direction: Flat) -> tuple[Any, Any]:
    """A function's value and its derivative in a direction, by reverse derivatives."""
    out, pull = vjp(f, at)[:2]
    return out, vjp(lambda cotangents: pull(cotangents)[0], tree.mapped(torch.zeros_like, out))[1](direction)[0]


def _loss(loss_fn: LossFn, plan: Plan, reshard: bool | None) -> ShardedLoss:
    """The global mean loss; without a choice, models of few bytes stay gathered."""
    check_loss(loss_fn, plan)
    expect("(loss_fn, plan, reshard=)", [("reshard", reshard, (bool, type(None)), "True, False or None")])
    return sharded_loss(loss_fn, plan, reshard=not keeps(plan) if reshard is None else reshard)


def _split(plan: Plan, params: Any, v: Any) -> tuple[Flat, Flat, Flat]:
    """The differentiated leaves, the other leaves, and the direction of the former."""
    trained, rest = split_trainable(plan, params)
    return own_storage(trained), rest, _direction(plan, trained, v)


def _direction(plan: Plan, trained: Flat, v: Any) -> Flat:
    direction = plan.check_tree(v, whole=False, what="v")
    return {path: direction[path].contiguous() for path in trained}
