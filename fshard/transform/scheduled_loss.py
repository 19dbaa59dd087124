"""``fs.func.sharded_loss``: a loss of shards whose derivatives by ``torch.func`` run on schedules.

The transforms around a call tell which derivatives will be taken. Where a schedule has all of them, the call computes
them at once, and hands each transform its own: a tangent, or the gradient that its backward multiplies by.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard.errors import ScheduleError
from fshard.model.remat_function import known
from fshard.runtime.engine import Mean
from fshard.runtime.engine.proxies import Proxy
from fshard.runtime.steps import Outcome, scalar, widened
from fshard.runtime.steps.step_options import read_running
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.torch_internals import (
    DispatchModeKey,
    FakeTensor,
    below_transforms,
    dispatch_mode,
    forward_parts,
    functorch,
    transforms_depth,
)
from fshard.training.metrics import combine_aux
from fshard.transform.active_transforms import derivatives_of
from fshard.transform.curved_units import data_of
from fshard.transform.dual_units import alone, make_dual
from fshard.transform.meeting import meeting
from fshard.transform.product_modes import Flat
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules
from fshard.transform.sharded_loss import LossFn, Scheduled, ShardedLoss
from fshard.transform.slopes import SlopeBesideLoss, ValueAndSlope
from fshard.transform.tangent_plan import frozen

GRAD, JVP = "grad", "jvp"
NESTS = [(GRAD,), (JVP,), (JVP, GRAD), (GRAD, JVP)]
"""The transforms around a loss that schedules compute, the outermost first."""

KINDS = 8
"""Nests and sets of leaves whose schedules are kept."""

Nest = tuple[str, ...]
Pairs = Mapping[str, tuple[Tensor, Tensor | None]]
"""Leaves and their tangents, by path."""


class Derivatives(NamedTuple):
    """A loss and its derivatives at one point.

    Attributes:
        values: the loss, and its derivative along a direction if there is one.
        gradient: the gradient of the loss; empty where none is taken.
        product: the derivative of that along the direction.
        aux: the auxiliary values.
    """

    values: tuple[Tensor, ...]
    gradient: Flat
    product: Flat
    aux: Any = ()


class ScheduledLoss(ShardedLoss, MayBeScheduled):
    """``f(params, batch) -> loss``. Made by ``fs.func.sharded_loss``.

    >>> import fshard as fs
    >>> plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> f = fs.func.sharded_loss(lambda p, x: (p["w"] * x).sum(), plan)
    >>> _ = torch.func.grad(f)({"w": torch.ones(3)}, torch.arange(3.0))
    >>> f.record == f.schedule.ops
    True
    """

    @functools.cached_property
    def _by_kind(self) -> dict[tuple[Nest, frozenset[str]], Schedules]:
        """Schedules by nest and by the leaves that it is taken by, the latest at the end."""
        return {}

    @property
    def _schedules(self) -> Schedules:  # type: ignore[override]
        if not self._by_kind:
            self._choose((GRAD,), frozenset(self.plan.leaves))
        return next(reversed(self._by_kind.values()))

    def _choose(self, nest: Nest, by: frozenset[str]) -> None:
        """Make the schedules of a nest that is taken by some leaves the latest ones."""
        made = self._by_kind.pop((nest, by), None)
        if made is None:
            if len(self._by_kind) == KINDS:  # each has memory of its own
                del self._by_kind[next(iter(self._by_kind))]
            make = functools.partial(self._made, nest)
            made = Schedules(frozen(self.plan, by), make, JVP in nest, GRAD in nest)
        self._by_kind[nest, by] = made

    def _made(self, nest: Nest, plan: Plan, double: Plan) -> ScheduledFunction:
        running = read_running(Policy(reshard=self.reshard), False)
        fn: Any = self.loss_fn
        if JVP in nest:
            fn = (SlopeBesideLoss if GRAD in nest else ValueAndSlope)(self, plan)
        fn = functools.partial(_by_arguments, fn, GRAD in nest)
        return ScheduledFunction(fn, plan, double, running, f"sharded loss under {', '.join(nest)}", GRAD in nest)

    def _begun(self, params: Any, batch: Any) -> tuple[Flat, Scheduled | None]:
        flat = self._checked(params, batch)
        trained = {path: flat[path] for path, leaf in self.plan.leaves.items() if leaf.trainable}
        nest, by = derivatives_of(trained, tree.leaves(batch))
        if nest not in NESTS or (self.has_aux and JVP in nest) or self.debug:
            self._unscheduled = (
                "no schedule has what is around it: other transforms, or none; a forward derivative with has_aux; debug"
            )
            return flat, None
        self._choose(nest, by)
        return flat, self._scheduled(nest, flat, {path: trained[path] for path in trained if path in by}, batch)

    def _scheduled(self, nest: Nest, flat: Flat, taking: Flat, batch: Any) -> Scheduled | None:
        """Gives the loss under a nest that is taken by some of its leaves; None if no schedule of any rank does."""
        pairs = _pairs(nest, taking)
        with below_transforms():
            at = {path: data_of(leaf) for path, leaf in flat.items()}
            along = {path: torch.zeros_like(leaf) for path, leaf in at.items()} if JVP in nest else {}
            at |= {path: data_of(primal) for path, (primal, _) in pairs.items()}
            along |= {path: data_of(tangent) for path, (_, tangent) in pairs.items() if tangent is not None}
            x = tree.mapped(lambda x: data_of(x) if isinstance(x, Tensor) else x, batch)
            if (scheduled := self._found(x, at, along)) is None:
                return None

        def run() -> Any:
            with below_transforms():
                outcome = self._outcome(scheduled, tree.nest(at), [tree.nest(along)] if along else [], x)
                if outcome is None:
                    return None
                found = self._derivatives(scheduled, outcome, bool(along))
            loss = _raised(nest, found, taking, pairs)
            return (loss, self._told(found.aux, flat, batch)) if self.has_aux else loss

        return run

    def _derivatives(self, scheduled: ScheduledFunction, outcome: Outcome, along: bool) -> Derivatives:
        """The derivatives that a schedule has computed, along a direction or not."""
        if not scheduled.spec.train:
            both = scheduled.result(outcome)
            return Derivatives((both["loss"], both["slope"]), {}, {})
        verdict, measured, device = outcome.verdict, outcome.measured, torch.device(self.plan.here.mesh.device)
        value = scalar(verdict.loss, widened([measured.losses[0][0].dtype]), device)
        first = _alone(scheduled.gradient(outcome))
        if not along:
            aux = _averaged(measured.aux[0], verdict.means, device)
            self.refuse_aux(aux)
            return Derivatives((value,), first, {}, aux)
        loss = combine_aux(measured.aux, verdict.means, verdict.floats)["loss"].to(device)
        return Derivatives((loss, value), _alone(scheduled.gradient(outcome, True)), first)

    def _told(self, aux: Any, flat: Flat, batch: Any) -> Any:
        """Auxiliary values of a run, as functions of the leaves. A derivative of them gathers where units run."""
        leaves, spec = tree.flatten(aux)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

        def again(*given: Tensor) -> tuple[Tensor, ...]:
            at = dict(zip(flat, given, strict=True))
            ranks = meeting(self.plan.mesh, batch, self._rows, tree.nest(at))
            found = self._gathered(at, batch, ranks)[1]
            return tuple([x for x in tree.leaves(found) if isinstance(x, Tensor)])

        for i, x in zip(places, known(again, [leaves[i] for i in places], [*flat.values()]), strict=True):
            leaves[i] = x
        return tree.unflatten(spec, leaves)


class ArgumentsAlone(TorchFunctionMode):
    """Refuses what a loss reads beside its arguments and takes part in derivatives: a schedule would miss these.

    In a trace, whose arguments are fake, it sees all such tensors. In a run it sees those of transforms that were left.

    Args:
        recorded: whether autograd records the loss; if not, its mode does not tell whether it would.
    """

    def __init__(self, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced = dispatch_mode(DispatchModeKey.FAKE) is not None
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, Tensor) and (self._in_trace(x) if traced else _of_left(x)):
                raise ScheduleError(
                    f"the loss reads a tensor of shape {tuple(x.shape)} that takes part in derivatives and is no "
                    "argument of it: a schedule has no derivative by that. Give it with the batch"
                )
        return func(*args, **kwargs)

    def _in_trace(self, x: Tensor) -> bool:
        taking = functorch.is_functorch_wrapped_tensor(x)
        if not taking and (torch.is_grad_enabled() or not self.recorded):
            taking = x.requires_grad
        while taking and functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
        return taking and not isinstance(x, FakeTensor | Proxy)


def _of_left(x: Tensor) -> bool:
    """Tell whether a tensor belongs to a transform that ``below_transforms`` has left."""
    return functorch.is_functorch_wrapped_tensor(x) and int(functorch.maybe_get_level(x)) > transforms_depth()


def _by_arguments(fn: LossFn, recorded: bool, params: Any, batch: Any) -> Any:
    """The loss, which must depend on nothing else that takes part in derivatives."""
    with ArgumentsAlone(recorded):
        return fn(params, batch)


def _averaged(aux: Any, means: Sequence[float], device: torch.device) -> Any:
    """Auxiliary values with global means in the place of ``fs.Mean``."""
    found = iter(means)

    def value(x: Any) -> Any:
        return scalar(next(found), widened([x.total.dtype]), device) if isinstance(x, Mean) else x

    return tree.mapped(value, aux)


def _alone(gradient: Any) -> Flat:
    """The leaves of a gradient, each in a storage of its own, since a tangent beside one would be as large as that."""
    return {path: alone(leaf) for path, leaf in tree.paths(gradient)}


def _pairs(nest: Nest, trained: Flat) -> Pairs:
    """The parts of leaves below the forward derivative of a nest; no tangent where it has none, or that is zero."""
    if JVP not in nest:
        return {path: (leaf, None) for path, leaf in trained.items()}
    depth = nest.index(JVP) + 1
    with below_transforms(depth):
        # A leaf by which the reverse derivative inside is not taken is none of its tensors.
        inner = {k: x if depth == len(nest) else functorch._unwrap_for_grad(x, len(nest)) for k, x in trained.items()}
        return {path: forward_parts(leaf, depth) for path, leaf in inner.items()}


def _raised(nest: Nest, found: Derivatives, trained: Flat, pairs: Pairs) -> Tensor:
    """The loss under all transforms of a nest, of derivatives that are below them."""
    values, gradient, product, _ = found
    for depth, kind in enumerate(nest, 1):
        with below_transforms(depth):
            if kind == JVP:
                values = (make_dual(*values),)
                gradient = {path: make_dual(gradient[path], product[path]) for path in gradient}
            elif depth == len(nest):
                values = (with_gradient(values[0], [(leaf, gradient[path]) for path, leaf in trained.items()]),)
            else:
                by_params = [(primal, product[path]) for path, (primal, _) in pairs.items()]
                by_tangents = [(along, gradient[path]) for path, (_, along) in pairs.items() if along is not None]
                loss = with_gradient(values[0], [(primal, gradient[path]) for path, (primal, _) in pairs.items()])
                values = (loss, with_gradient(values[1], by_params + by_tangents))
    return values[0]


class WithGradient(torch.autograd.Function):
    """A value as a function of leaves, whose gradient is known."""

    @staticmethod
    def forward(value: Tensor, *given: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1 + len(inputs) // 2 :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [grad * slope for slope in ctx.saved_tensors]
        return grad, *slopes, *[None] * len(slopes)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """The tangent of the value, which has that of the leaves in it."""
        return tangent


def with_gradient(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A value as a function of leaves, each beside its part of the gradient."""
    leaves, slopes = zip(*pairs, strict=True)
    found: Tensor = WithGradient.apply(value, *leaves, *slopes)  # type: ignore[no-untyped-call]
    return found


def sharded_loss(
    loss_fn: LossFn, plan: Plan, *, has_aux: bool = False, reshard: bool = True, debug: bool = False
) -> ScheduledLoss:
    """The loss over the global batch, as a pure function of this rank's shards.

    ``f(params, batch)`` composes with everything in ``torch.func``, in any nesting, and with ``torch.autograd``:
    gradients come out as shards, as ``params`` go in. All ranks must apply the same transforms in the same order.
    ``torch.func.linearize`` is refused: ``fs.func.linearize`` does it. What travels is exact, also where ``fs.Wire``
    rounds it in steps.

    Under ``grad``, ``vjp`` or ``jvp``, a ``jvp`` of a gradient or a gradient of a ``jvp``, by all leaves or by some,
    the call computes what the transforms will take on a schedule, as a train step does: ``f.schedule``. Under others it
    gathers where units run.

    Args:
        loss_fn: as for ``fs.make_train_step``. With ``fs.Mean`` the global mean is exact.
        plan: the plan.
        has_aux: return ``(loss, aux)``; ``fs.Mean`` leaves of aux become global means, others are this rank's own.
        reshard: free a unit's parameters after its forward, and gather them again for its backward, so that no rank
            holds the whole model. Without a schedule the unit is computed again, too. False gathers everything once,
            which is faster but needs its memory.
        debug: check on each call that replicated leaves are equal on all ranks, and that the loss depends on the rank
            only through its batch.

    Returns:
        The function.

    >>> params = {"w": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> f = fs.func.sharded_loss(lambda p, x: (p["w"] * x).sum(), plan)
    >>> torch.func.grad(f)(fs.shard(params, plan), torch.arange(3.0))
    {'w': tensor([0., 1., 2.])}
    """
    return ScheduledLoss(loss_fn, plan, has_aux, reshard, debug)
