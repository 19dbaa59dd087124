"""The train step: a loss function, an optimizer and a plan become one function of a state and a batch."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from fshard.collectives.scope import bind
from fshard.optim.base import Optimizer, rate
from fshard.optim.contract import Contract, LearningRate, contract
from fshard.runtime.comm import collective_call
from fshard.runtime.engine.rng import seeded
from fshard.runtime.execution import (
    PendingUpdate,
    Shards,
    Shield,
    Update,
    gradients_of,
)
from fshard.runtime.execution.update_memory import state_needs
from fshard.runtime.steps import (
    Decisions,
    Options,
    Outcome,
    Programs,
    Runner,
    StepRequest,
    Verdict,
    make_programs,
    refuse_transforms,
    scalar,
    widened,
)
from fshard.runtime.steps.addresses import where
from fshard.runtime.steps.decide import finite, skip_rule, skipped_by
from fshard.runtime.steps.norm_sets import watched
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.settle import complete
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState, expect_state, not_copied
from fshard.training.latest import OneFunction
from fshard.training.metrics import Metrics, RunReport, combine_aux
from fshard.training.padding_check import padding_of, without_draws
from fshard.training.updating import Updating


class Asked(NamedTuple):
    """Requests of the caller of one step, beside the state and the batch."""

    shield: Shield
    lr: LearningRate
    stop: bool
    rule: Callable[[], Contract]  # the optimizer, whose learning rate was asked once


class TrainStep(OneFunction):
    """``step(state, batch) -> (state, metrics)``. Made by ``fs.make_train_step``.

    With deferred updates, the default, the step is atomic: if it raises, on this rank or on another, the state that it
    was given is as it was before, bit for bit, and can be used again. With ``update="in_backward"`` a step that fails
    may have updated some groups already.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> state, metrics = step(state, torch.tensor([3.0, 4.0]))
    >>> step, metrics.loss, state.params["w"]
    (<train step of 1 leaves in 1 groups, sgd(...)>, tensor(7.), tensor([-0.5000, -1.0000]))
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        opt: Optimizer,
        plan: Plan,
        options: Options,
        programs: Programs | None = None,
        runner: Runner | None = None,
    ) -> None:
        self.opt, self.plan, self.options = opt, plan, options
        rule = contract(opt)
        self._updating = Updating(rule, plan, plan, options.clip, options.running.graph)
        programs = programs or programs_of(plan, options, rule)
        runner = self._runner = runner or Runner(loss_fn, programs)
        self._early = runner.in_backward  # whether updates happen there
        grads = gradients_of(plan, programs.memory, self._updating.slices({}))
        watch = watched(options.norms, plan, grads)
        self._decide = Decisions(rule, plan, options.clip, runner.parts, runner.divisor, grads, watch)
        self._equal = Equal(plan.whole or plan, options.told(), opt, always=options.running.debug)
        self._skip = skip_rule(options)
        self._since: Mapping[str, int] = {}
        self._padding = padding_of(options.running.buckets, runner)
        self._last: PendingUpdate | None = None  # the update that may still read the memory of this step's gradients
        self._late: BaseException | None = None  # a signal that came when the step before was made

    @property
    def programs(self) -> Programs:
        """The programs that the step has met."""
        return self._runner.programs

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """The loss function."""
        return self._runner.finder.fn

    @functools.cached_property
    def _randomness(self) -> Callable[[int, int], AbstractContextManager[None]]:
        """The context of a seed and a step in which the program draws its random numbers."""
        mesh = self.plan.mesh
        return functools.partial(seeded, part=mesh.whole.index(self.plan.data_axes), device=mesh.device)

    def __repr__(self) -> str:
        return f"<train step of {len(self.plan.leaves)} leaves in {len(self.plan.groups)} groups, {self.opt!r}>"

    __reduce__ = not_copied

    @collective_call
    def __call__(
        self, state: TrainState, batch: Any, *, lr: LearningRate = None, stop: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Make one step.

        Signals that come while ranks communicate wait until the loss function runs. If the step is made by then, on all
        ranks, the next one raises what their handlers raise, such as ``KeyboardInterrupt``.

        Args:
            state: the state; donated unless the step was made with ``donate=False``.
            batch: this rank's part of the global batch: any pytree of tensors and plain values.
            lr: the learning rate of this step, in the place of the optimizer's own; equal on all ranks. Of
                ``fs.optim.partition`` several by its patterns, ``{r".*bias": 0.1}``; other rules keep theirs.
            stop: ask all ranks to stop after this step: where any rank does, ``metrics.stop`` is True on all of them.

        Returns:
            The next state, and the metrics.

        Raises:
            DonatedError: the state was donated to an earlier step.
            PlanError: ``lr`` is not a learning rate, or the optimizer has several.
            BatchError, LossError, UnitError: the batch or the program breaks a rule; alike on all ranks.
            NonFiniteError: the gradient norm is not finite.
            ReplicationError: ranks differ in what must be equal; or in debug mode, in a copy of a leaf or its gradient.
            PeerError: another rank failed.
            CommError: a collective failed or timed out; the process group is lost.
            TransformError: it was called inside of a transform of ``torch.func``.
            Exception: whatever the loss function raises.
        """
        refuse_transforms("a train step")
        expect_state(state, "step")
        late, self._late = self._late, None
        rule = functools.cache(functools.partial(self._updating.fixed, state.step, lr))
        result = None
        try:
            with Shield(late) as shield:
                result = self._make(state, batch, Asked(shield, lr, stop, rule))
            self._late = shield.late
            return result
        except BaseException:
            result = None  # a traceback that is kept must not hold the next state, which nobody else has
            raise

    def _make(self, state: TrainState, batch: Any, asked: Asked) -> tuple[TrainState, Metrics]:
        begun = perf_counter()
        self._accept(state)
        if self._padding is not None:
            facts = functools.partial(self._equal.of, state, asked.lr)
            batch = self._padding.padded(batch, functools.partial(self._tried, state, asked), facts)
        update = self._update(state, asked.rule)
        with bind(self.plan.mesh, self.plan.data_axes):
            outcome = self._runner.run(self._request(state, batch, update, asked))
        state.memory.note_compared()
        return self._conclude(state, update, outcome, asked, self._ran(batch, begun, outcome))

    def _tried(self, state: TrainState, asked: Asked, batch: Any) -> tuple[float, float]:
        """The loss of a batch and the norm of its gradient. Nothing is updated, and no random number is drawn."""
        request = self._request(state, batch, self._update(state, asked.rule), asked)
        with bind(self.plan.mesh, self.plan.data_axes):
            constant = functools.partial(without_draws, request.randomness)
            verdict = self._runner.run(request._replace(randomness=constant)).verdict
        self._decide.grads.drop()
        return verdict.loss, verdict.norm

    def _request(self, state: TrainState, batch: Any, update: Update, asked: Asked) -> StepRequest:
        decide, scale = self._decide, self._skip.scale(state.scale)
        loss_scale = scale.value if scale is not None else 1.0
        return StepRequest(
            batch,
            update.shards,
            asked.shield,
            update,
            refuse=asked.rule,
            facts=functools.partial(self._equal.of, state, asked.lr),
            randomness=functools.partial(self._randomness, state.seed, state.step),
            accumulated=decide.accumulated(state.step, state.count, update.shards, loss_scale),
            loss_scale=loss_scale,
            feedback=decide.feedback(state.summed, loss_scale),
            rules=decide.rules(state.step),
            rule_norms=functools.partial(decide.rule_norms, state.step),
            stop=asked.stop,
        )

    def _ran(self, batch: Any, begun: float, outcome: Outcome) -> RunReport:
        """Say how the step ran on this rank, which began it at this time."""
        runner, device = self._runner, self.plan.mesh.device
        latest = runner.latest
        flops = runner.flops(batch)
        busy = [row[0] for row in outcome.verdict.told] if self.plan.mesh.together.size > 1 else []
        return RunReport(
            perf_counter() - begun, flops, device, latest.schedule, latest.record, latest.times, busy, latest.graph
        )

    def _conclude(
        self, state: TrainState, update: Update, outcome: Outcome, asked: Asked, ran: RunReport
    ) -> tuple[TrainState, Metrics]:
        """The next state, and the metrics: what the outcome of a step makes of a state."""
        verdict, decide, rule = outcome.verdict, self._decide, self._skip
        now = state.scale, verdict.loss, verdict.norm
        overflow = rule.overflows(*now)
        self._check_numbers(verdict, state)
        factor = decide.mean(state.step, state.count, verdict)
        summed = state.summed if overflow else decide.summed(state.step, state.summed, verdict)
        lr = rate(asked.rule().lr, state.step // decide.every + 1)
        metrics = self._metrics(state.step, outcome, factor, overflow, ran, lr)
        skips = not overflow and rule.skips(state.scale, verdict.loss, decide.norm(verdict, factor))
        rule.note(*now)
        if skips or not overflow and skipped_by(self.options.skip, metrics, self._runner.programs.comms.control):
            decide.grads.drop()
            return state, replace(metrics, skipped=True)
        memory = self._memory(state, update, outcome, factor if not overflow else None, asked.rule())
        scale = rule.after(state.scale, overflow)
        count = decide.count(state.step, state.count, verdict, overflow)
        number = state.step + (not overflow)
        past = state.past.compared()
        following = TrainState(self.plan, number, state.seed, memory, scale, count, state.late, past, summed)
        if self.options.donate:
            state.memory.donate(None if self._early else memory)
        return following, metrics

    def _memory(
        self, state: TrainState, update: Update, outcome: Outcome, factor: float | None, rule: Contract
    ) -> StateMemory:
        """The buffers of the next state, with the update that waits for the next forward, unless there is no factor."""
        verdict, decide = outcome.verdict, self._decide
        if self._early:
            return StateMemory(self.plan, update.shards, update.pending, update.stale)
        if factor is None:
            decide.grads.drop()
            return StateMemory(self.plan, self._handed_on(state))
        unit = decide.unit(verdict, outcome.divided)
        scales = decide.scales(state.step, factor, verdict, unit)
        self._last = self._updating.pending(state, state.step, decide.grads, scales, rule, unit)
        return StateMemory(self.plan, self._handed_on(state), self._last, self._updating.shared)

    def _update(self, state: TrainState, rule: Callable[[], Contract]) -> Update:
        """Return what the schedule applies: the update of the step before, or, in the backward, that of this step."""
        if self._last is not None and self._last is not state.pending:
            self._last.detach()
            self._last = None
        if not self._early:
            return Update(state.shards(), state.pending, state.stale)
        shards = complete(state, self.plan.mesh).finished()
        try:
            made = rule()
        except Exception:  # which the step refuses before it begins, on all ranks
            made = self._updating.opt
        pending = self._updating.pending(state, state.step, self._decide.grads, (None,), made)
        return Update(shards if self.options.donate else shards.clone(), pending, {**self._updating.shared})

    def _handed_on(self, state: TrainState) -> Shards:
        """The shards of the next state."""
        return state.shards() if self.options.donate else state.finished().clone()

    def _accept(self, state: TrainState) -> None:
        """Refuse a state that does not fit, and go by what it says of leaves that began late."""
        state.check_plan(self.plan)
        self._updating.check(state)
        if state.late != self._since:
            slices = self._updating.slices(state.late)
            self._decide = replace(self._decide, grads=self._decide.grads.cut(slices))
            self._since = state.late

    def _check_numbers(self, verdict: Verdict, state: TrainState) -> None:
        """Refuse numbers that are not finite, unless they are skipped; and copies that differ."""
        comm, early = self._runner.programs.comms.control, self._early
        if self._skip.refuses(state.scale, verdict.loss, verdict.norm):
            shards = {} if early else self._decide.grads.shards
            place = where(self.plan, shards, comm, origin=self._runner.programs.origin)
            raise self._skip.not_finite(verdict, state.step, place, early)
        checked = self.options.running.debug or self._updating.unproven
        if checked and not early and finite(verdict.loss, verdict.norm):
            self._updating.check_copies(self._decide.grads, comm)

    def _metrics(self, step: int, outcome: Outcome, factor: float, skipped: bool, ran: RunReport, lr: float) -> Metrics:
        verdict, decide, wide = outcome.verdict, self._decide, self._updating.wide
        aux = combine_aux(outcome.measured.aux, verdict.means, verdict.floats)
        loss = scalar(verdict.loss, widened([outcome.measured.losses[0][0].dtype]))
        norm = scalar(decide.norm(verdict, factor), wide)
        norms = {name: scalar(one, wide) for name, one in decide.named_norms(step, factor, verdict).items()}
        return Metrics(loss, norm, aux, skipped, verdict.stop, lr, norms, verdict.count, ran)


def programs_of(plan: Plan, options: Options, opt: Contract) -> Programs:
    """The programs of a train step."""
    state = state_needs(plan, opt, options.clip.number, options.donate)
    return make_programs(plan, options.running, accumulate=options.accumulate, state=state)
