"""The train step: a loss function, an optimizer and a plan become one function of a state and a batch."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fshard.arguments import described
from fshard.collectives.copies import check_copies
from fshard.collectives.scope import bind
from fshard.errors import PlanError, TreeError, no_processes
from fshard.optim.base import Optimizer
from fshard.optim.checks import is_optimizer, optimizer_meant
from fshard.optim.contract import contract
from fshard.optim.scaling import LossScale, Scale
from fshard.runtime.comm import Communicator
from fshard.runtime.engine.batch import microbatches
from fshard.runtime.engine.remat import read_remat
from fshard.runtime.engine.rng import seeded
from fshard.runtime.execution.rounding import Rounding, rounded_groups
from fshard.runtime.execution.signals import Shield
from fshard.runtime.execution.trace import idle_leaves, trace
from fshard.runtime.execution.update import Pending, Shards, Update, parted
from fshard.runtime.memory.optimizer_layout import optimizer_layout, update_slices
from fshard.runtime.steps.attempt import Outcome, raise_outcome, refuse_transforms
from fshard.runtime.steps.backends import make_cache
from fshard.runtime.steps.clip import read_clip
from fshard.runtime.steps.commit import Verdict, scalar, widened
from fshard.runtime.steps.decide import Decisions, not_finite
from fshard.runtime.steps.float16 import overflowed, scale_problems, warn_of_float16
from fshard.runtime.steps.options import Options, flag_problems, late_problems, step_problems
from fshard.runtime.steps.prepare import Workshop, communicators_of
from fshard.runtime.steps.runner import Runner, Work
from fshard.schedule.auto import Auto, Choice
from fshard.schedule.footprint import Footprint, footprint
from fshard.schedule.ops import Op
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation, measured
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.fit import check_late, check_optimizer
from fshard.state.memory import Memory
from fshard.state.settle import complete
from fshard.state.train_state import TrainState, expect_state, not_copied
from fshard.training.metrics import Metrics, combine_aux


class TrainStep:
    """``step(state, batch) -> (state, metrics)``. Made by ``fs.make_train_step``.

    With deferred updates, the default, the step is atomic: if it raises, on this rank or on another, the state that it
    was given is as it was before, bit for bit, and can be used again. With ``update="in_backward"`` a step that fails
    may have updated some groups already.
    """

    def __init__(self, loss_fn: Callable[..., Any], opt: Optimizer, plan: Plan, options: Options) -> None:
        self.opt, self.plan, self.options = opt, plan, options
        self._rule = contract(opt)
        workshop = Workshop(plan, options.policy, options.accumulate, True, options.debug, communicators_of(plan))
        workshop.cache, workshop.remat = make_cache(options.compile), options.remat
        self._runner = Runner(loss_fn, workshop)
        self._kept = {g.id: optimizer_layout(g.owned, plan.mesh, self._rule) for g in plan.groups if g.trainable}
        self._grads = workshop.gradients(update_slices(plan, self._rule, options.clip.number), self._rule)
        self._wide = widened([group.dtype for group in plan.groups if group.trainable])
        self._since: Mapping[str, int] = {}
        self._rounded = rounded_groups(plan)
        self._axes, self._part = plan.data_axes, plan.mesh.index(plan.data_axes)
        self._decide = Decisions(self._rule, options.clip, options.skip_norm, options.skip, self._runner, self._grads)
        self._equal = Equal(plan, options.told(), opt, always=options.debug)
        self._early = options.policy.update == "in_backward"
        self._parted = parted(plan)
        self._senders: Mapping[int, Communicator] = workshop.comms.senders() if workshop.comms is not None else {}
        self._layouts: object = None  # where the states so far keep the optimizer's buffers
        self._last: Pending | None = None  # the update that may still read the memory of this step's gradients
        self._traced: Schedule | None = None
        self._choice: Choice | None = None
        self._late: BaseException | None = None  # a signal that came when the step before was made

    def __repr__(self) -> str:
        return f"<train step of {len(self.plan.leaves)} leaves in {len(self.plan.groups)} groups, {self.opt!r}>"

    __reduce__ = not_copied

    def __call__(self, state: TrainState, batch: Any, *, stop: bool = False) -> tuple[TrainState, Metrics]:
        """Make one step.

        Signals that come while ranks communicate wait until the loss function runs. If the step is made by then, on all
        ranks, the next one raises what their handlers raise, such as ``KeyboardInterrupt``.

        Args:
            state: the state; donated unless the step was made with ``donate=False``.
            batch: this rank's part of the global batch: any pytree of tensors and plain values.
            stop: ask all ranks to stop after this step: where any rank does, ``metrics.stop`` is True on all of them.

        Returns:
            The next state, and the metrics.

        Raises:
            DonatedError: the state was donated to an earlier step.
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
        with Shield(late) as shield:
            result = self._make(state, batch, shield, stop)
        self._late = shield.late
        return result

    def _make(self, state: TrainState, batch: Any, shield: Shield, stop: bool) -> tuple[TrainState, Metrics]:
        self._check_state(state)
        update = self._update(state)
        randomness = functools.partial(seeded, state.seed, state.step, self._part, self.plan.mesh.device)
        scale = self._scale_of(state)
        boost = scale.value if scale else 1.0
        check = functools.partial(self._decide.refuse, state.step)
        self._decide.carry(state.step, state.count, update.shards, boost)
        facts = functools.partial(self._equal.of, state)
        work = Work(batch, update.shards, shield, update, check, facts, randomness, boost=boost, stop=stop)
        with bind(self.plan.mesh, self._axes):
            outcome = self._runner.run(work)
        state.memory.note_compared()
        verdict = self._check(outcome, scale)
        overflow = overflowed(self.options.loss_scale, scale, verdict)
        if self.options.debug and not self._early and not overflow:
            check_copies(self.plan, self._grads.shards, self._control())
        factor = self._decide.mean(state.step, state.count, verdict)
        norm = self._decide.norm(verdict, factor)
        metrics = self._metrics(outcome, verdict, norm, overflow)
        if not overflow and self._decide.skips(metrics, self._control()):
            self._grads.drop()
            return state, replace(metrics, skipped=True)
        if self._early:
            memory = Memory(self.plan, update.shards, update.pending, update.stale)
        elif overflow:
            self._grads.drop()
            memory = Memory(self.plan, self._handed_on(state))
        else:
            unit = self._decide.unit(verdict, outcome.divided)
            scales = self._decide.scales(state.step, norm, factor, self._control(), unit)
            self._last = Pending(self._rule, state.step, self._grads, scales, self._rounding(state))
            memory = Memory(self.plan, self._handed_on(state), self._last, self._parted)
        if scale is not None and self.options.loss_scale is not None:
            scale = self.options.loss_scale.after(scale, finite=not overflow)
        count = self._decide.count(state.step, state.count, verdict, overflow)
        number = state.step + (not overflow)
        following = TrainState(self.plan, number, state.seed, memory, scale, count, state.late, state.past.compared())
        if self.options.donate:
            state.memory.donate()
        return following, metrics

    def _update(self, state: TrainState) -> Update:
        """What the schedule applies: the update of the step before, or, in the backward, that of this step."""
        if self._last is not None and self._last is not state.pending:
            self._last.detach()
            self._last = None
        if not self._early:
            return Update(state.shards(), state.pending, state.stale, self._senders)
        shards = complete(state, self.plan.mesh).finished()
        pending = Pending(self._rule, state.step, self._grads, rounding=self._rounding(state))
        return Update(shards if self.options.donate else shards.clone(), pending, {**self._parted}, self._senders)

    def _handed_on(self, state: TrainState) -> Shards:
        """The shards of the next state."""
        return state.shards() if self.options.donate else state.finished().clone()

    def trace(self, batch: Any) -> Schedule:
        """The schedule for batches like this one, without running it. Needs no processes: any mesh will do.

        Raises:
            PlanError: the program depends on values of tensors, so that only a real step finds it.
        """
        with bind(self.plan.mesh, self.plan.data_axes):
            found = self._runner.look(batch)
        if found is None:
            raise PlanError(
                "the program depends on values of the batch's tensors, which a trace does not have: call the step "
                "once; it gathers on demand and finds the schedule for the next"
            )
        self._traced = self._runner.workshop.schedule(found)
        if isinstance(self.options.policy, Auto):
            self._choice = self._runner.workshop.choice(found)
        return self._traced

    def footprint(self, batch: Any) -> Footprint:
        """What a step on batches of these shapes holds at its peak beside its state, without running it.

        Activations are those of the eager engine (``compile=None``), as fake tensors show them: memory that an operator
        takes for itself alone is not in it.

        Raises:
            PlanError: the program depends on values of tensors, so that only a real step finds it.
        """
        part = microbatches(batch, self.options.accumulate)[0]
        with bind(self.plan.mesh, self.plan.data_axes):
            found = trace(self._runner.fn, self.plan, part, True, self.options.remat)
        if found is None:
            raise PlanError("the program depends on values of the batch's tensors, so its memory cannot be foreseen")
        return footprint(self._runner.workshop.schedule(found), found.needs)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest step, or of the latest ``trace``. ``print`` it.

        Raises:
            PlanError: neither has happened yet.
        """
        latest = self._runner.latest
        schedule = latest.schedule if latest is not None and latest.schedule is not None else self._traced
        if schedule is None:
            raise PlanError("no schedule yet: it is found from a batch; call step.trace(batch), or the step itself")
        return schedule

    @property
    def choice(self) -> Choice:
        """What ``schedule="auto"`` chose for the latest step, or the latest ``trace``, and from what. ``print`` it.

        Raises:
            PlanError: nothing was chosen.
        """
        latest = self._runner.latest
        made = self._runner.workshop.choices
        if latest is not None and latest.schedule is not None and latest.schedule.program.text in made:
            return made[latest.schedule.program.text]
        if self._choice is None:
            raise PlanError("no choice: the schedule was given, or is not found yet; see schedule= of make_train_step")
        return self._choice

    @property
    def record(self) -> tuple[Op, ...]:
        """What the latest step ran on this rank, op by op. It equals ``schedule.ops`` if the program kept to it."""
        return tuple(self._runner.record)

    @property
    def measured(self) -> Simulation:
        """The latest step as it ran on this rank, in the form of a simulation: ``print`` it, or draw it.

        Times are those of the host, which on a GPU runs ahead of the device. A transfer counts as under way until the
        op that waits for it is over, since nothing tells when it has arrived.

        Raises:
            PlanError: the latest step did not keep to a schedule, or there was none.
        """
        if not self._runner.times or self.record != self.schedule.ops:
            raise PlanError(
                "nothing was measured: the latest step left its schedule, was made on demand, or is to come"
            )
        return measured(self.schedule, self._runner.times)

    @property
    def units(self) -> str:
        """What the units met so far run as: a graph, and which other units share it; or themselves, and why."""
        cache = self._runner.workshop.cache
        return "every unit runs as it is: compile=None" if cache is None else cache.text()

    @property
    def unused(self) -> tuple[str, ...]:
        """The trained leaves that the latest program gives no gradient: theirs is zero, and they only decay.

        Raises:
            PlanError: no program yet, or one that no trace finds.
        """
        return idle_leaves(self._runner.seen)

    def _check_state(self, state: TrainState) -> None:
        state.check_plan(self.plan)
        layouts = state.shards().layouts
        if layouts is not self._layouts:
            for group, kept in self._kept.items():
                if layouts[group] != kept:
                    raise TreeError(
                        f"the state holds {list(layouts[group])} for the optimizer, {self.opt!r} keeps {list(kept)}, "
                        "or not of the same leaves: make the state with fs.init_state(plan, opt, ...) and this "
                        "optimizer"
                    )
            self._layouts = layouts
        if state.late != self._since:
            check_late(self.opt, state.late)
            self._since, slices = state.late, update_slices(self.plan, self._rule, self.options.clip.number, state.late)
            self._grads = replace(self._grads, update_slices=slices, views={})
            self._decide = replace(self._decide, grads=self._grads)

    def _control(self) -> Communicator:
        comms = self._runner.workshop.comms
        if comms is None:
            raise no_processes()
        return comms.control

    def _rounding(self, state: TrainState) -> Rounding | None:
        return Rounding(self.plan, state.seed, self._rounded) if self._rounded else None

    def _scale_of(self, state: TrainState) -> Scale | None:
        """Where loss scaling stands; None for a step without it."""
        return None if (rule := self.options.loss_scale) is None else state.scale or rule.start()

    def _check(self, outcome: Outcome, scale: Scale | None) -> Verdict:
        verdict = raise_outcome(self._control(), outcome, self.plan.mesh.rank)
        if overflowed(self.options.loss_scale, scale, verdict):
            return verdict
        if not math.isfinite(verdict.norm) or not math.isfinite(verdict.loss):
            raise not_finite(verdict, self._early)
        return verdict

    def _metrics(self, outcome: Outcome, verdict: Verdict, norm: float, skipped: bool) -> Metrics:
        aux = combine_aux(self._control(), outcome.aux)
        loss = scalar(verdict.loss, widened([outcome.losses[0][0].dtype]))
        return Metrics(loss, scalar(norm, self._wide), aux, skipped, verdict.stop)


def make_train_step(
    loss_fn: Callable[..., Any],
    opt: Optimizer,
    plan: Plan,
    *,
    clip_norm: float | Sequence[tuple[str, float | None]] | None = None,
    skip_norm: float | None = None,
    skip: Callable[[Metrics], bool] | None = None,
    accumulate: int = 1,
    schedule: Policy | Auto | str | None = None,
    donate: bool = True,
    debug: bool = False,
    compile: str | None = None,
    remat: Any = None,
    loss_scale: LossScale | None = None,
) -> TrainStep:
    """Make the function that trains: ``step(state, batch) -> (state, metrics)``.

    Args:
        loss_fn: ``loss_fn(params, batch)``, which returns a scalar tensor, an ``fs.Mean``, or either with a dict of
            auxiliary values. It is run once on fake tensors to find the order of its units.
        opt: an optimizer of ``fs.optim``.
        plan: the plan.
        clip_norm: clip the global norm of the gradient to this, exactly (``torch.nn.utils.clip_grad_norm_``). Rules
            ``[(pattern, limit), ...]`` on paths clip the leaves of each by their own norm; the first match wins.
        skip_norm: skip a step whose gradient norm is larger: the state that comes back is the one that went in.
        skip: skip a step of whose metrics this function says so. All ranks must say the same.
        accumulate: microbatches into which each batch is cut along dim 0; gradients are those of the whole batch. With
            an ``fs.Mean`` they may be of unequal size. ``fs.Microbatches`` gives them one by one.
        schedule: how the schedule is built: prefetch depth, reductions in flight, reshard after forward, and when
            updates happen. None stands for ``fs.Policy()``. ``"auto"``, or ``fs.Auto(memory=...)``, chooses at the
            first step, by memory and simulated time; ``step.choice`` says what and why.
        donate: reuse the memory of the state that a step takes.
        debug: fill every freed range with nan, so that a read of freed memory shows; compare copies of leaves and of
            optimizer state before every step; and the gradients of leaves that ranks along other than the data axes
            hold copies of, so that a missing ``pvary`` shows.
        compile: None runs units as they are. ``"fx"`` traces each distinct unit once and runs the ops of its forward
            and its backward without the rest of the unit's Python and of autograd; every result keeps its bits.
            ``"inductor"`` compiles them with torch's compiler, which fuses ops and changes the last bits. Units that
            cannot be traced run as they are; ``step.units`` names them.
        remat: which units are computed again in their backward, so that less memory is held between the two: None, for
            none; ``"all"``; a policy of ``fs.policies``, which says whose results are kept nevertheless; or rules
            ``[(pattern, one of these)]``, of which the first that matches the whole of a unit's name counts. Gradients
            keep their bits.
        loss_scale: how the loss is scaled for the backward, ``fs.LossScale()``, which float16 needs. A step whose
            gradient is not finite is skipped on all ranks: it returns the state as it was, with a smaller scale, and
            ``metrics.skipped``. A loss that is not finite stays an error, since no scale would mend it.

    Raises:
        PlanError: an option that cannot be; ``compile="inductor"`` where there is no C++ compiler.

    >>> import torch, fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("shard",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("shard"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = make_train_step(lambda params, batch: (batch @ params["w"]).sum(), opt, plan)
    >>> state, metrics = step(fs.init_state(plan, opt, params={"w": w}), torch.ones(1, 2))
    >>> metrics.loss, state.step, state.params["w"]
    (tensor(10.), 1, tensor([0.9000, 1.9000, 2.9000, 3.9000]))
    """
    policy = Policy() if schedule is None else Auto() if schedule == "auto" else schedule
    if not isinstance(policy, Policy | Auto):
        raise PlanError(f"schedule={schedule!r} must be fs.Policy(...), 'auto' or fs.Auto(...)")
    if not isinstance(plan, Plan) or not is_optimizer(opt):
        raise PlanError(
            f"make_train_step(loss_fn, opt, plan) takes an optimizer of fs.optim and a plan, and was given "
            f"{described(opt)} and {described(plan)}{optimizer_meant(opt)}"
        )
    clip = read_clip(clip_norm, plan)
    problems = [
        *flag_problems(donate=donate, debug=debug),
        *step_problems(loss_fn, plan, clip, accumulate, policy),
        *late_problems(opt, policy, skip_norm, skip),
        *scale_problems(loss_scale, policy),
    ]
    if problems:
        raise PlanError("; ".join(problems))
    check_optimizer(plan, opt)
    options = Options(clip, skip_norm, skip, accumulate, policy, donate, debug, compile, read_remat(remat), loss_scale)
    warn_of_float16(plan, loss_scale)
    return TrainStep(loss_fn, opt, plan, options)
