"""Products with derivatives: directions, Hessians, Gauss-Newton matrices, traces. No matrix is ever formed.

Forward derivatives are faster. Where an operator has none, reverse derivatives give the same product: the Hessian is
symmetric, and the pullback of a pullback is the pushforward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp
from torch.func import jvp as forward

from fshard import tree
from fshard.collectives.linear import LinearSum, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import cutting
from fshard.errors import PlanError
from fshard.model.missing import NO_FORWARD, explained
from fshard.model.random import fold_in
from fshard.model.remat_function import exact
from fshard.runtime.comm import telling
from fshard.runtime.engine import read_loss
from fshard.sharding.plan import Plan
from fshard.transform import tree_vectors
from fshard.transform.gather import gather_all
from fshard.transform.sharded_loss import LossFn, sharded_loss
from fshard.transform.tree_vectors import split_trainable, zero_filled

Flat = dict[str, Tensor]


def jvp(loss_fn: LossFn, plan: Plan) -> Callable[[Any, Any, Any], tuple[Tensor, Tensor]]:
    """The loss and its derivative in a direction: ``jvp(loss_fn, plan)(params, v, batch) -> (loss, slope)``.

    One forward pass with forward-mode derivatives (``jax.jvp``); a gradient where an operator has none.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.

    Returns:
        The function. ``v`` is a tree of shards like ``params``; its values for frozen leaves are ignored.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> along = jvp(lambda params, batch: (batch @ params["w"]).sum(), plan)
    >>> along({"w": w.flatten()}, {"w": torch.ones(4)}, torch.ones(1, 2))
    (tensor(10.), tensor(4.))
    """
    f, modes = sharded_loss(loss_fn, plan), ProductModes()

    @telling(plan.mesh, always=False)
    def along(params: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        trained, rest, direction = _split(plan, params, v)

        def of(p: Flat) -> Tensor:
            value: Tensor = f(tree.nest({**rest, **p}), batch)
            return value

        def reverse() -> tuple[Tensor, Tensor]:
            slopes, value = grad_and_value(of)(trained)
            return value, tree_vectors.vdot(zero_filled(plan, slopes, rest), zero_filled(plan, direction, rest), plan)

        with _plain_attention():
            found: Any = modes.run(lambda: forward(of, (trained,), (direction,)), reverse)
        return found[0], found[1]

    return along


def hvp(loss_fn: LossFn, plan: Plan) -> Callable[[Any, Any, Any], dict[str, Any]]:
    """The Hessian of the global mean loss times a vector: ``hvp(loss_fn, plan)(params, v, batch)``.

    Forward over reverse (Pearlmutter, "Fast exact multiplication by the Hessian", 1994) takes about the time of two
    gradients. From the first call that finds an operator of the gradient without forward derivative, it is reverse
    over reverse.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.

    Returns:
        The function. ``v`` and the product are trees of shards like ``params``, zero for frozen leaves.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> product = hvp(lambda params, batch: (params["w"] * batch).square().sum() / 2, plan)
    >>> product({"w": torch.zeros(4)}, {"w": torch.ones(4)}, torch.tensor([[1.0, 2.0]]))
    {'w': tensor([1., 4., 1., 4.])}
    """
    f, modes = sharded_loss(loss_fn, plan), ProductModes()

    @telling(plan.mesh, always=False)
    def product(params: Any, v: Any, batch: Any) -> dict[str, Any]:
        trained, rest, direction = _split(plan, params, v)
        gradient = grad(lambda p: f(tree.nest({**rest, **p}), batch))
        with _plain_attention():
            moved: Flat = modes.run(
                lambda: forward(gradient, (trained,), (direction,))[1],
                lambda: vjp(gradient, trained)[1](direction)[0],
            )
        return zero_filled(plan, moved, rest)

    return product


def gnvp(predict: Callable[..., Any], loss_fn: LossFn, plan: Plan) -> Callable[[Any, Any, Any], dict[str, Any]]:
    """The generalized Gauss-Newton matrix times a vector: ``gnvp(predict, loss_fn, plan)(params, v, batch)``.

    The matrix is ``J^T H J``, where ``J`` is the Jacobian of the outputs and ``H`` the Hessian of the loss by them
    (Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002). For a softmax with
    cross entropy it is the Fisher matrix, and it is positive semi-definite for any convex loss.

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

    pushing, bending = ProductModes(), ProductModes()

    @cutting(plan.mesh)
    def product(params: Any, v: Any, batch: Any) -> dict[str, Any]:
        trained, rest, direction = _split(plan, params, v)

        def outputs(p: Flat) -> Any:
            with exact():
                return predict(gather_all(plan, {**rest, **p}), batch)

        def share(out: Any) -> Tensor:
            with exact():
                loss = read_loss(loss_fn(out, batch))
            count = torch.as_tensor(1.0 if loss.count is None else loss.count, device=loss.total.device)
            count = count.detach().to(loss.total)
            data = Ranks(plan.mesh, plan.data_axes)
            return loss.total / (apply(count, LinearSum(data)) if data.size > 1 else count)

        with _plain_attention():
            found: Any = pushing.run(
                lambda: forward(outputs, (trained,), (direction,)), lambda: _pushed(outputs, trained, direction)
            )
            out, moved = found[0], found[1]
            curved = bending.run(
                lambda: forward(grad(share), (out,), (moved,))[1], lambda: vjp(grad(share), out)[1](moved)[0]
            )
        (pulled,) = vjp(outputs, trained)[1](curved)
        return zero_filled(plan, pulled, rest)

    return product


def hessian_trace_samples(loss_fn: LossFn, plan: Plan, samples: int = 16) -> Callable[[Any, Any, Tensor], Tensor]:
    """Samples whose mean is the trace of the Hessian: ``hessian_trace_samples(loss_fn, plan)(params, batch, key)``.

    Each is ``z @ H z`` of random signs ``z``, an unbiased estimate (Hutchinson 1990). They do not depend on the mesh.

    Args:
        loss_fn: as for ``fs.make_train_step``, without aux.
        plan: the plan.
        samples: the number of ``z``, each one Hessian-vector product.

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
    times = hvp(loss_fn, plan)

    @telling(plan.mesh, always=False)
    def probes(params: Any, batch: Any, key: Tensor) -> Tensor:
        found = []
        for number in range(samples):
            signs = tree_vectors.rademacher(fold_in(key, number), plan)
            found.append(tree_vectors.vdot(signs, times(params, signs, batch), plan))
        return torch.stack(found)

    return probes


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


def _pushed(f: Callable[[Flat], Any], at: Flat, direction: Flat) -> tuple[Any, Any]:
    """A function's value and its derivative in a direction, by reverse derivatives."""
    out, pull = vjp(f, at)[:2]
    return out, vjp(lambda cotangents: pull(cotangents)[0], tree.mapped(torch.zeros_like, out))[1](direction)[0]


def _split(plan: Plan, params: Any, v: Any) -> tuple[Flat, Flat, Flat]:
    """The differentiated leaves, the other leaves, and the direction of the former."""
    trained, rest = split_trainable(plan, params)
    direction = plan.check_tree(v, whole=False, what="v")
    # PyTorch gives a tangent the layout of its primal's storage. Shards are views of chunks, so without the clone each
    # leaf's tangent would be as large as its group.
    own = {path: leaf.clone() for path, leaf in trained.items()}
    return own, rest, {path: direction[path].contiguous() for path in trained}


def _plain_attention() -> AbstractContextManager[None]:
    """Attention without fused kernels, which have no forward derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
