"""Functions of parameters, linearized at one point: one forward pass, and then any number of products.

The forward derivative of a function is the pullback of its pullback. So a graph that is recorded once, by reverse
derivatives, gives products in both directions, and no operator needs a forward derivative.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.scope import bind, cutting
from fshard.errors import LossError, TreeError, lines
from fshard.model.model_refusals import explained
from fshard.model.remat_function import exact
from fshard.runtime.comm import collective_call
from fshard.runtime.engine.batch import check_device
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.equal import Equal
from fshard.transform.gather import Resharding, Versions, gather_all
from fshard.transform.meeting import LossMeeting, meeting
from fshard.transform.tree_vectors import check_direction, split_trainable, zero_filled

Flat = dict[str, Tensor]

KEPT = 2**27
"""Bytes of gathered parameters up to which tools that are not told keep them between the passes of a derivative."""


@dataclass(frozen=True)
class LinearMap:
    """A linear map of trees of shards, at the parameters and the batch at which it was made.

    Attributes:
        value: what the linearized function returned.
        forward: the map of the trainable leaves, by path.
        backward: its transpose.
        frozen: the other leaves.
        domain: checks a cotangent.
    """

    plan: Plan
    value: Any
    forward: Callable[[Flat], Any] = field(repr=False)
    backward: Callable[[Any], Flat] = field(repr=False)
    frozen: Flat = field(repr=False)
    domain: Callable[[Any], Any] = field(repr=False)

    @collective_call
    def __call__(self, v: Any) -> Any:
        """The product with a direction.

        Args:
            v: a tree of shards like the parameters; its values for frozen leaves are ignored.

        Returns:
            A pytree like ``value``.

        Raises:
            TreeError: ``v`` is not this rank's part of the plan's tree.
            PeerError: another rank raised before the product.
        """
        direction = self._met("a product", lambda: check_direction(self.plan, v))
        with cutting(self.plan.mesh), explained("the function"):
            moved = {path: leaf.contiguous() for path, leaf in direction.items() if path not in self.frozen}
            return self.forward(moved)

    @collective_call
    def pull(self, u: Any) -> dict[str, Any]:
        """The product of the transposed map with a cotangent, added up over ranks.

        Args:
            u: a pytree like ``value``.

        Returns:
            A tree of shards like the parameters, zero for frozen leaves.

        Raises:
            TreeError: ``u`` has another structure, other shapes or other dtypes than ``value``.
            PeerError: another rank raised before the product.
        """
        given = self._met("a transposed product", lambda: self.domain(u))
        with cutting(self.plan.mesh), explained("the function"):
            return zero_filled(self.plan, self.backward(given), self.frozen)

    def _met(self, place: str, check: Callable[[], Any]) -> Any:
        return meeting(self.plan.mesh, None, BatchRows()).all_ranks(f"{place} of a linear map", check)


@dataclass(frozen=True)
class Linearize:
    """``at(params, batch) -> LinearMap``. Made by ``fs.func.linearize``."""

    fn: Callable[[Any, Any], Any]
    plan: Plan
    reshard: bool

    @collective_call
    def __call__(self, params: Any, batch: Any) -> LinearMap:
        """The linear map at these parameters and this rank's batch.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
            LossError: the function returned a leaf that is not a floating-point tensor.
            PeerError: the function raised on another rank.
        """
        ranks = meeting(self.plan.mesh, batch, BatchRows(), params)
        equal = Equal(self.plan, {"tool": "linearize", "reshard": self.reshard})
        trained, frozen = met(ranks, self.plan, params, batch, equal)

        def outputs(p: Flat) -> Any:
            with self._params({**frozen, **p}, ranks) as gathered, bind(self.plan.mesh, self.plan.data_axes), exact():
                return _checked(self.fn(gathered, batch))

        with cutting(self.plan.mesh), plain_attention(), explained("the function"):
            found: Any = ranks.all_ranks("the function", lambda: vjp(outputs, trained))
        pull = Pullback(found[1], found[0])
        return LinearMap(
            self.plan, tree.mapped(torch.Tensor.detach, found[0]), pull.transposed, pull, frozen, pull.check
        )

    def _params(self, flat: Flat, ranks: LossMeeting) -> AbstractContextManager[dict[str, Any]]:
        if self.reshard:
            return Resharding(self.plan, flat, ranks.handshake, Versions()).params()
        return nullcontext(gather_all(self.plan, flat))


@dataclass
class Pullback:
    """The pullback of a function of a flat tree, and its transpose, which is recorded when it is first asked for."""

    pulled: Callable[[Any], Any]
    value: Any
    pushed: Callable[[Flat], Any] | None = None

    def __call__(self, u: Any) -> Flat:
        found: Flat = self.pulled(u)[0]
        return found

    def transposed(self, direction: Flat) -> Any:
        """The pushforward: a pullback is linear in the cotangent, so where it is transposed does not matter."""
        if self.pushed is None:
            zeros = tree.mapped(lambda x: torch.zeros_like(x.detach()), self.value)
            self.pushed = vjp(self, zeros)[1]
        return self.pushed(direction)[0]

    def check(self, u: Any) -> Any:
        """The cotangent, if it is like the value.

        Raises:
            TreeError: it is not.
        """
        given, spec = tree.flatten(u)
        wanted, structure = tree.flatten(self.value)
        if spec != structure:
            raise TreeError(f"the cotangent has the structure {spec}, and the function's value {structure}")
        names = tree.names(self.value, "u")
        rows = [
            f"{name}: {_form(one)}, not {_form(other)}"
            for name, one, other in zip(names, given, wanted, strict=True)
            if _form(one) != _form(other)
        ]
        if rows:
            raise TreeError(lines("the cotangent is not like the function's value:", rows, "Give one like .value."))
        return u


def linearize(fn: Callable[[Any, Any], Any], plan: Plan, *, reshard: bool = False) -> Callable[[Any, Any], LinearMap]:
    """A function's derivative as a linear map: ``linearize(fn, plan)(params, batch)`` (``jax.linearize``).

    One forward pass; every product after it, with directions and with cotangents, reads what that pass kept. So it
    suits solvers, which multiply by one matrix many times. For Hessians and Gauss-Newton matrices there are
    ``fs.func.hvp(...).linearize`` and ``fs.func.gnvp(...).linearize``.

    Args:
        fn: ``fn(params, batch)``, this rank's outputs: any pytree of floating-point tensors.
        plan: the plan.
        reshard: keep shards and the inputs of units alone: every product gathers each unit's parameters and computes
            the unit again. False keeps gathered parameters and activations as long as the map lives.

    Returns:
        The function. It returns a map with the attribute ``value``, ``fn``'s outputs. ``map(v)``, for a tree of shards
        like ``params``, is the derivative of the outputs along ``v``; ``map.pull(u)``, for ``u`` like ``value``, is the
        gradient of ``(u * value).sum()`` over all ranks, a tree of shards.

    Raises:
        PlanError: invalid arguments.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> of = fs.func.linearize(lambda params, batch: (batch @ params["w"]) ** 2, plan)
    >>> map = of({"w": w.flatten()}, torch.ones(1, 2))
    >>> map.value, map({"w": torch.ones(4)}), map.pull(torch.ones(1, 2))
    (tensor([[16., 36.]]), tensor([[16., 24.]]), {'w': tensor([ 8., 12.,  8., 12.])})
    """
    wants: list[Want] = [
        ("fn", fn, Callable, "a function fn(params, batch)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("reshard", reshard, bool, "True or False"),
    ]
    expect("fs.func.linearize(fn, plan)", wants)
    refuse_stages("fs.func.linearize(fn, plan)", plan)
    return Linearize(fn, plan, reshard)


def met(ranks: LossMeeting, plan: Plan, params: Any, batch: Any, equal: Equal, v: Any = None) -> tuple[Flat, Flat]:
    """The trainable leaves, each in storage of its own, and the others, when all ranks have checked theirs.

    Raises:
        TreeError, BatchError: alike on all ranks, before anything is gathered.
    """

    def checked() -> tuple[Flat, Flat]:
        trained, frozen = split_trainable(plan, params)
        check_device(batch, plan.mesh.device)
        if v is not None:
            check_direction(plan, v)
        return own_storage(trained), frozen

    if plan.mesh.size > 1 and plan.mesh.transport is None:
        checked()  # outside of run, where ranks cannot meet, an error says how trees of whole tensors are given
    found: tuple[Flat, Flat] = ranks.all_ranks("the call", checked, ranks.facts(equal))
    return found


def own_storage(trained: Flat) -> Flat:
    """Copies of leaves.

    PyTorch gives a tangent the layout of its primal's storage. Shards are views of chunks, so without the clone each
    leaf's tangent would be as large as its group.
    """
    return {path: leaf.clone() for path, leaf in trained.items()}


def keeps(plan: Plan) -> bool:
    """Tell whether the gathered parameters of a plan are so few that tools keep them unless they are told."""
    return sum(group.parts * group.chunk * group.compute_dtype.itemsize for group in plan.groups) <= KEPT


def plain_attention() -> AbstractContextManager[None]:
    """Attention without fused kernels, which have no forward derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def _checked(value: Any) -> Any:
    """The outputs of a function, if all are floating-point tensors."""
    names, found = tree.names(value, "fn(params, batch)"), tree.leaves(value)
    wrong = [
        name for name, x in zip(names, found, strict=True) if not (isinstance(x, Tensor) and x.is_floating_point())
    ]
    if wrong or not found:
        told = wrong or ["no tensor at all"]
        raise LossError(
            lines("fn must return floating-point tensors alone:", told, "Leave out what has no derivative.")
        )
    return value


def _form(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
