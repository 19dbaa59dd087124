"""``fs.value_and_grad``: the first part of a step. A loss and its gradient, on a schedule of its own or in a step's."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.gradient_copies import check_copies
from fshard.collectives.scope import bind
from fshard.errors import PlanError, TreeError
from fshard.hints import teaching
from fshard.model.model_refusals import explained
from fshard.optim.scaling import LossScale
from fshard.parts.step_values import PART, running_of
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.comm import collective_call
from fshard.runtime.engine.rng import seeded
from fshard.runtime.execution import HELD_LOCALLY, Shard, Shards, Shield, Update, held_back
from fshard.runtime.steps import (
    Outcome,
    PassSpec,
    Programs,
    Runner,
    StepRequest,
    make_programs,
    refuse_compiling,
    scalar,
)
from fshard.runtime.steps.step_options import RunOptions, read_running, refuse_feedback
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import Flat, form_of
from fshard.state.settle import complete
from fshard.state.train_state import TrainState
from fshard.training.latest import OneFunction
from fshard.training.metrics import combine_aux
from fshard.transform.active_transforms import under_way
from fshard.transform.scheduled_loss import ScheduledLoss
from fshard.transform.shard_chunks import chunks_of
from fshard.transform.sharded_loss import LossFn, ShardedLoss
from fshard.transform.tree_vectors import split_trainable, zero_filled

_TENSOR = object()


class ValueAndGrad(OneFunction):
    """``(params_or_state, batch) -> (loss, grads)``. Made by ``fs.value_and_grad``.

    Attributes:
        loss: the loss as a pure function of shards, for transforms.
        plan: the plan as given.
        read: the plan as this part reads it: what ``only=`` leaves out is frozen.
        params: the form of the parameters.
        grads: the form of the gradients.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> grad = fs.value_and_grad(lambda params, x: (params["w"] * x).sum(), plan)
    >>> grad(state, torch.tensor([3.0, 4.0]))
    (tensor(7.), {'w': tensor([3., 4.])})
    """

    def __init__(
        self, loss: ShardedLoss, only: str | None, accumulate: int, running: RunOptions, loss_scale: LossScale | None
    ) -> None:
        self.loss, self.plan, self.only, self.accumulate, self.running = loss, loss.plan, only, accumulate, running
        chosen = loss.plan if only is None else loss.plan.only(only)
        # The result is the gradient of all that a rank keeps, not only of the part that its optimizer would update.
        self.read = replace(chosen, groups=tuple(replace(g, opt_axes=(), opt_parts=1) for g in chosen.groups))
        self.params = form_of(self.plan)
        trained = None if only is None else [path for path, leaf in chosen.leaves.items() if leaf.trainable]
        self.grads = form_of(self.read, trained, "gradients, as fs.value_and_grad returns them")
        told = running.told() | {"only": only, "accumulate": accumulate, "loss_scale": loss_scale}
        self.equal = Equal(self.plan, told, always=running.debug)
        self.spec = PassSpec(loss.loss_fn, self.read, self._programs, True, accumulate, running.remat, loss_scale)
        self._runner = Runner(loss.loss_fn, self._programs(), PART)

    def _programs(self, debug: bool = False) -> Programs:
        return make_programs(self.read, self.running.debugged(debug), accumulate=self.accumulate)

    def __repr__(self) -> str:
        return f"<value and grad of {getattr(self.loss.loss_fn, '__name__', 'a function')}>"

    @collective_call
    def __call__(self, params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The global mean loss and its gradient.

        Args:
            params: a state, whose pending update is hidden behind the forward; or this rank's part of the parameters,
                such as ``state.params``. Neither changes in value.
            batch: this rank's part of the global batch.

        Returns:
            The loss, 0-dim and equal on all ranks, or ``(loss, aux)``; and the gradients, a tree of shards like
            ``params``, zero for frozen leaves. With ``only=`` it has the chosen leaves alone.

        Raises:
            TreeError, BatchError, LossError, UnitError: arguments or a loss that break a rule; alike on all ranks.
            TransformError: ``torch.compile`` is under way.
            PeerError: another rank failed.
        """
        refuse_compiling("a gradient")
        running = running_of(params)
        if running is not None and (isinstance(params, TrainState) or not under_way(_tensors(params))):
            part: tuple[Any, dict[str, Any]] = running.gradient(self, params, batch)
            return part
        if isinstance(params, TrainState):
            return self._of_state(params.here, batch)
        if self.spec.loss_scale is not None:
            raise TreeError(
                "value_and_grad(loss_scale=) takes the state, which holds the scale: give it, not its params"
            )
        flat = self.plan.check_tree(params, whole=False)
        if under_way(list(flat.values())):
            return self._transformed(params, batch)
        chunks = chunks_of(params, self.params)
        shards = Shards([Shard(chunks[group.id].detach(), {}) for group in self.plan.groups])
        return self._made(
            batch, lambda shield: StepRequest(batch, shards, shield, facts=self.equal.fixed, normed=False)
        )

    def _of_state(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        state.check_plan(self.plan)
        if state.memory.lent:
            state.applied()
        shards = complete(state, self.plan.mesh).shards() if state.stale else state.shards()
        if state.pending is not None:  # its schedule updates the groups that it trains; the others are due now
            waiting = list(state.pending.waiting)
            with held_back(HELD_LOCALLY):
                state.pending.apply(shards, [group for group in waiting if not self.read.groups[group].trainable])
        mesh, rule, within = self.plan.mesh, self.spec.loss_scale, state.memory.origin is not None

        part = mesh.index(self.plan.data_axes)

        def request(shield: Shield) -> StepRequest:
            return StepRequest(
                batch,
                shards,
                shield,
                Update(shards, state.pending, {}),
                facts=lambda: self.equal.of(state),
                normed=False,
                loss_scale=1.0 if rule is None else (state.scale or rule.start()).value,
                randomness=lambda: nullcontext() if within else seeded(state.seed, state.step, part, mesh.device),
            )

        found = self._made(batch, request)
        state.memory.note_compared()
        return found

    def _transformed(self, params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        if self.only is not None:
            raise PlanError("value_and_grad(only=) under a transform: differentiate fs.func.sharded_loss by the leaves")
        trained, rest = split_trainable(self.plan, params)

        kept: list[Any] = []

        def of(trained: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            found = self.loss(tree.nest({**rest, **trained}), batch)
            value, aux = found if self.loss.has_aux else (found, {})
            leaves, spec = tree.flatten(aux)  # torch.func takes only tensors
            kept[:] = [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
            return value, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        with explained(repr(self)):
            grads, (value, tensors) = torch.func.grad_and_value(of, has_aux=True)(trained)
        spec, leaves = kept
        found = iter(tensors)
        aux = tree.unflatten(spec, [next(found) if leaf is _TENSOR else leaf for leaf in leaves])
        return ((value, aux) if self.loss.has_aux else value), zero_filled(self.plan, grads, rest)

    def _made(self, batch: Any, request: Callable[[Shield], StepRequest]) -> tuple[Any, dict[str, Any]]:
        """Run the function on its own schedule."""
        with held_back() as shield:
            with bind(self.plan.mesh, self.plan.data_axes):
                outcome = self._runner.run(request(shield))
            return self._result(outcome)

    def _result(self, outcome: Outcome) -> tuple[Any, dict[str, Any]]:
        verdict, aux, total = outcome.verdict, outcome.measured.aux, outcome.measured.losses[0][0]
        dtype = torch.promote_types(total.dtype, torch.float32)
        value = scalar(verdict.loss, dtype, total.device)
        self.loss.refuse_aux(aux[0] if aux else {})
        homes = self._runner.programs.memory.homes
        if self.running.debug:
            check_copies(self.read, homes, self._runner.programs.comms.control)
        # Copies: the next call overwrites the buffers of this one.
        chunks = {group.id: homes[group.id] * verdict.scale for group in self.grads.groups if group.id in homes}
        grads = Flat(self.grads, chunks | self.grads.zero_chunks()).tree()
        if self.loss.has_aux:
            return (value, combine_aux(aux, verdict.means, verdict.floats)), grads
        return value, grads


@teaching
@made_on_each_rank(batches=False)
def value_and_grad(
    loss_fn: LossFn,
    plan: Plan,
    *,
    only: str | None = None,
    has_aux: bool = False,
    accumulate: int = 1,
    schedule: Policy | Auto | str | None = None,
    remat: Any = None,
    compile: str | None = None,
    loss_scale: LossScale | None = None,
    debug: bool = False,
) -> ValueAndGrad:
    """The global mean loss and its gradient, as a function of parameters and a batch (``jax.value_and_grad``).

    It takes a state, or this rank's part of the parameters. By itself it runs on a schedule of its own, like a train
    step without the update: gathers and reductions overlap with compute. In a function that ``fs.make_step`` runs, it
    is a part of that step's schedule. Under a transform of ``torch.func``, or where autograd records (a parameter
    requires grad, or has a forward-mode tangent), it runs ``fs.func.sharded_loss``, and can be differentiated.

    Args:
        loss_fn: as for ``fs.make_train_step``.
        plan: the plan.
        only: a regular expression for whole paths: the gradient is that of these leaves alone. The others stay sharded,
            are gathered unit by unit, and get no gradient and no reduction.
        has_aux: return ``((loss, aux), grads)``.
        accumulate: microbatches into which the batch is cut.
        schedule: as for ``fs.make_train_step``; under a transform only ``reshard`` matters.
        remat: as for ``fs.make_train_step``.
        compile: as for ``fs.make_train_step``.
        loss_scale: scale the loss for the backward by what the state holds, as float16 needs; the gradients are those
            of the loss itself. ``fs.make_update(loss_scale=)`` adapts it.
        debug: as for ``fs.make_train_step``; under a transform, check what ``fs.func.sharded_loss(debug=True)`` checks.

    Raises:
        PlanError: an invalid option; ``only=`` that matches no trained leaf.

    >>> params = {"w": torch.ones(3), "b": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> def loss_fn(params, x):
    ...     return (params["w"] * x + params["b"]).sum()
    >>> fs.value_and_grad(loss_fn, plan, only="w")(fs.shard(params, plan), torch.arange(3.0))
    (tensor(6.), {'w': tensor([0., 1., 2.])})
    """
    running = read_running(schedule, debug, compile, remat)
    wants: list[Want] = [
        ("only", only, (str, type(None)), "a regular expression for paths, or None"),
        ("has_aux", has_aux, bool, "True or False"),
        ("loss_scale", loss_scale, (LossScale, type(None)), "fs.LossScale(...) or None"),
    ]
    expect("value_and_grad(loss_fn, plan)", wants)
    if type(accumulate) is not int or accumulate < 1:
        raise PlanError(f"accumulate={accumulate!r} must be an int >= 1")
    policy = running.policy
    resharded = isinstance(policy, Auto) or policy.reshard is not False
    loss = ScheduledLoss(loss_fn, plan, has_aux, resharded, debug)
    refuse_feedback(plan, "value_and_grad")
    return ValueAndGrad(loss, only, accumulate, running, loss_scale)


def _tensors(params: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(params) if isinstance(leaf, Tensor)]
