"""``fs.make_update``: the other part of a step. Gradients become an update that the next forward hides."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fshard import tree
from fshard.arguments import Want, described, expect
from fshard.errors import NonFiniteError, PlanError, TreeError, lines
from fshard.optim.base import Optimizer, rate
from fshard.optim.checks import is_optimizer, optimizer_meant
from fshard.optim.contract import LearningRate, contract
from fshard.optim.scaling import LossScale
from fshard.parts.copy_marks import Marks, axes_of_copies
from fshard.parts.leaf_ages import Ages, ages_of, trained_leaves
from fshard.parts.step_values import PART, running_of
from fshard.parts.update_metrics import UpdateMetrics
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.comm import Facts, collective_call, digest, mesh_communicator, refuse_nested
from fshard.runtime.execution import Gradients, PendingUpdate, Several, held_back, parts_of
from fshard.runtime.memory.memory_spaces import update_stagings
from fshard.runtime.memory.norms import norms_of, share_of
from fshard.runtime.memory.optimizer_layout import UpdateSlice
from fshard.runtime.steps import refuse_transforms, scalar
from fshard.runtime.steps.addresses import here, where
from fshard.runtime.steps.clip import norms_by_rule, read_clip
from fshard.runtime.steps.consensus import FAILED, Tally, Verdict, consensus, tally
from fshard.runtime.steps.decide import Streak, not_finite
from fshard.runtime.steps.failures import raise_failure
from fshard.runtime.steps.handshake import Intent, agree
from fshard.runtime.steps.readings import RuleNorms, read
from fshard.runtime.steps.step_options import SKIPS, late_problems
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.fit import check_optimizer
from fshard.state.flat import Flat, FlatForm, flat_of, form_of, known_flat, same_layout
from fshard.state.settle import complete
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState, expect_state, not_copied
from fshard.training.updating import Updating


class UpdateStep:
    """``update(state, grads) -> (state, metrics)``. Made by ``fs.make_update``.

    Attributes:
        plan: the plan.
        chosen: the plan in which every leaf is frozen that it does not update.
        form: the form of the gradients.
        clip: the limits of gradient norms.
        streak: the updates that are skipped.
        loss_scale: how the scale of the loss adapts, if gradients are those of a scaled loss.
    """

    def __init__(
        self,
        opt: Optimizer,
        plan: Plan,
        clip_norm: Any,
        skip_norm: float | None,
        only: str | None,
        loss_scale: LossScale | None,
        donate: bool,
        skip_limit: int = SKIPS,
    ) -> None:
        self.plan, self.only, self.loss_scale, self.donate = plan, only, loss_scale, donate
        self.streak = Streak(0 if skip_norm is None else skip_limit, skip_norm)
        rule, self.chosen = check_optimizer(plan, opt), plan if only is None else plan.only(only)
        self.clip = read_clip(clip_norm, self.chosen)
        self.updating = Updating(rule, plan, self.chosen, self.clip)
        self.paths = tuple(path for path, leaf in self.chosen.leaves.items() if leaf.trainable)
        self.form = form_of(self.chosen, self.paths, "the gradients of the leaves that it updates")
        told = {"update": only, "clip_norm": self.clip.rules, "skip_norm": skip_norm, "loss_scale": loss_scale}
        told["skip_limit"] = self.streak.limit
        self.equal = Equal(plan, told, opt)
        self._latest: Ages | None = None  # those of the latest state
        self._slices: dict[int, tuple[UpdateSlice, ...]] = {}  # what it updates at these ages
        self._fitting: FlatForm | None = None  # the latest form of gradients that was found to fit
        self._made: tuple[Flat, object, Gradients] | None = None  # the latest gradients

    def __repr__(self) -> str:
        return f"<update{'' if self.only is None else f' of {self.only!r}'} by {self.updating.opt.opt!r}>"

    __reduce__ = not_copied

    @collective_call
    def __call__(self, state: TrainState, grads: Any, *, lr: LearningRate = None) -> tuple[TrainState, UpdateMetrics]:
        """Update a state. The update waits for the next forward, which hides it, or for the first read of the state.

        Args:
            state: the state; donated unless the update was made with ``donate=False``.
            grads: the gradients of the leaves that it updates, as ``fs.value_and_grad`` returns them, or any tree of
                this rank's parts. They are donated with the state: a clone can be used afterwards.
            lr: the learning rate of this update, in the place of the optimizer's own; equal on all ranks. Of
                ``fs.optim.partition`` several by its patterns.

        Returns:
            The next state, and the metrics.

        Raises:
            DonatedError: the state, or the gradients, were donated before.
            TreeError: gradients of other leaves, or of another plan.
            PlanError: ``lr`` is not a learning rate, or the optimizer has several.
            NonFiniteError: the gradient norm is not finite.
            ReplicationError: ranks give different learning rates.
            PeerError: another rank failed.
        """
        refuse_transforms("an update")
        expect_state(state, "update")
        if (running := running_of(state)) is not None:
            found: tuple[TrainState, UpdateMetrics] = running.update(self, state, grads, lr)
            return found
        with held_back():
            return self._alone(state.here, grads, lr)

    def _alone(self, state: TrainState, grads: Any, lr: LearningRate) -> tuple[TrainState, UpdateMetrics]:
        """Update outside of a step: two exchanges of its own."""
        refuse_nested(PART)
        comm, flat, failure, facts = mesh_communicator(self.plan.mesh), None, None, Facts()
        try:
            flat = self.checked(state, grads, lr)
            facts = self.equal.of(state, lr)
        except BaseException as error:
            failure = error
        intent = Intent(digest(["update", self.only]), self.__repr__)
        agree(comm, PART, intent, None, False, failure, facts)
        assert flat is not None
        if state.stale:
            complete(state, self.plan.mesh)
        verdict = self._norms(flat)
        state.memory.note_compared()
        skips, overflows = self.skips(state, verdict.norm), self.overflows(state, verdict.norm)
        if not skips and not math.isfinite(verdict.norm):
            raise self.not_finite(verdict, state.step, where(self.plan, self.gradients(flat).shards, comm))
        self.note(state, verdict.norm)
        if skips:
            return self.after(state, True, overflows), self.metrics(verdict.norm, True)
        following = self.conclude(state, flat, verdict, lr)
        if state.memory.lent and following.stale:  # in a step function, states can be read without fs.settle
            complete(following, self.plan.mesh)
        return following, self.metrics(verdict.norm, False)

    @property
    def may_skip(self) -> bool:
        """Tell whether only the gradient norm tells if the update happens."""
        return self.loss_scale is not None or self.streak.largest is not None

    def overflows(self, state: TrainState, norm: float) -> bool:
        """Tell whether a smaller scale may mend gradients of this norm."""
        rule = self.loss_scale
        return rule is not None and not math.isfinite(norm) and (state.scale or rule.start()).value > rule.least

    def skips(self, state: TrainState, norm: float) -> bool:
        """Tell whether gradients of this norm update nothing."""
        return self.overflows(state, norm) or self.streak.skips(math.isfinite(norm), norm)

    def note(self, state: TrainState, norm: float) -> None:
        """Note an update that is over, whose gradients have this norm."""
        if not self.overflows(state, norm):
            self.streak.note(math.isfinite(norm))

    def after(self, state: TrainState, skipped: bool, overflow: bool = False) -> TrainState:
        """A state after this update: its numbers, and not its memory."""
        rule, scale, step, late = self.loss_scale, state.scale, state.step, dict(state.late)
        if rule is not None and (overflow or not skipped):
            scale = rule.after(scale or rule.start(), finite=not overflow)
        if not skipped:
            ages = self._ages(state.late)
            step, late = step + ages.after.more, ages.after.late
        return replace(state, step=step, late=late, scale=scale)

    def _norms(self, flat: Flat) -> Verdict:
        """Ask all ranks for the norms of gradients."""
        comm, failure, mine = mesh_communicator(self.plan.mesh), None, Tally(FAILED)
        over, marks = axes_of_copies([self.plan]) if comm.size > 1 else [], Marks()
        own = [0.0] * len(over)
        try:
            if over:
                marks.note("gradients", flat)
                own = [*read(marks.values(over))]
            mine = tally((), self.rule_norms(flat), (), (), False, False)
            mine = replace(mine, sumsq=math.fsum(mine.rules) if all(map(math.isfinite, mine.rules)) else math.nan)
        except Exception as error:  # a device reports late what went wrong there
            failure = error
        verdict = consensus(comm, mine, 1, 1, 1.0, len(self.clip.rules), own)
        if verdict.worst == FAILED:
            raise_failure(comm, failure, verdict.status)
        marks.check(comm, self.plan.mesh, over, verdict.told)
        return verdict

    def rule_norms(self, flat: Flat) -> list[RuleNorms]:
        """The norms of this rank's gradients, by clipping rule."""
        if self._latest is None:
            self._ages({})
        gradients = self.gradients(flat)
        if len(self.clip.rules) > 1 or len(flat.form.order.paths) > len(self.paths):
            return norms_by_rule(len(self.clip.rules), self.plan, gradients)
        norms = norms_of([gradients.shards[group] for group in self._shares])
        return [list(zip(self._shares.values(), norms, strict=True))]

    def checked(self, state: TrainState, grads: Any, lr: LearningRate) -> Flat:
        """The gradients as chunks, if both fit.

        Raises:
            TreeError, DonatedError, PlanError: they do not.
        """
        state.check_plan(self.plan)
        self.check_state(state, lr)
        return self.fitting(grads)

    def check_state(self, state: TrainState, lr: LearningRate) -> None:
        """Refuse a state whose optimizer state is not that of this optimizer, and a learning rate that is none.

        Raises:
            TreeError: its buffers are others.
            PlanError: the optimizer has no learning rate for the next step, or cannot count the updates of each leaf.
        """
        self.updating.check(state, self._ages(state.late).relative)
        rate(self.updating.rated(lr).lr, state.step + 1)

    def fitting(self, grads: Any) -> Flat:
        """Gradients as chunks: those behind the tree, or copies.

        Raises:
            TreeError: of other leaves, or of another plan.
        """
        if isinstance(grads, TrainState):
            raise TreeError("update(state, grads): grads is a state; give the gradients of fs.value_and_grad")
        flat = known_flat(grads)
        if flat is not None and self._fits(flat.form):
            return flat
        if isinstance(grads, Mapping) and self.only is None:  # those of frozen leaves are zero
            found = dict(tree.paths(grads))
            idle = {path for path, leaf in self.plan.leaves.items() if not leaf.trainable}
            grads = tree.nest({path: leaf for path, leaf in found.items() if path not in idle}) if idle else grads
        return flat_of(grads, self.form, "grads")

    def _fits(self, form: FlatForm) -> bool:
        """Tell whether trees of a form have the leaves that are updated, and of others only frozen ones."""
        if form is self._fitting:
            return True
        more = set(form.order.paths) - set(self.paths)
        fits = (
            form.plan.mesh is self.plan.mesh
            and set(self.paths) <= set(form.order.paths)
            and not any(self.plan.leaves[path].trainable for path in more if path in self.plan.leaves)
            and same_layout(form.plan, self.plan)
        )
        self._fitting = form if fits else self._fitting
        return fits

    def conclude(self, state: TrainState, flat: Flat, verdict: Verdict, lr: LearningRate) -> TrainState:
        """The next state, whose update waits.

        Args:
            state: the state.
            flat: the gradients.
            verdict: their norms.
            lr: the learning rate, if it is not the optimizer's own.
        """
        pending = self.pending(state, flat, verdict.rules, 1.0, lr)
        memory = state.memory
        shards, before = state.shards(), state.pending
        if memory.lent or not self.donate:  # the gradients may be used again
            pending.detach()
        if before is not None and before.waiting and before.groups & pending.groups:
            shards, before = state.applied(), None
        waiting = before is not None and before.waiting
        both = Several((*parts_of(before), pending)) if waiting else pending
        if not self.donate and not memory.lent:
            shards, both = state.applied().clone(), pending
        following = StateMemory(self.plan, shards, both, self.updating.shared)
        following.lent, following.origin = memory.lent, memory.origin
        made = replace(self.after(state, False), memory=following, past=state.past.compared())
        if self.donate and not memory.lent:
            memory.donate(following)
            flat.donate()
        return made

    def not_finite(self, verdict: Verdict, step: int, place: Sequence[str]) -> NonFiniteError:
        """The error of gradients, or a loss, that are not finite: with the step after this one, and the place."""
        return not_finite(verdict, False, [f"step {step + 1}", *self.streak.told(), *place])

    def check_here(self, state: TrainState, flat: Flat, norm: float) -> None:
        """Refuse gradients that are read within a step and are not finite.

        Raises:
            NonFiniteError: with what this rank holds of them.
        """
        if not math.isfinite(norm):
            place = here(self.plan, self.gradients(flat).shards)
            raise self.not_finite(Verdict((), math.nan, norm, 1.0), state.step, [place] * bool(place))

    def pending(
        self, state: TrainState, flat: Flat, norms: Sequence[float], scale: float, lr: LearningRate
    ) -> PendingUpdate:
        """The update, as data."""
        ages = self._ages(state.late)
        divisors = self.clip.divisors(scale, [scale * norm for norm in norms])
        step = state.step - ages.least
        return self.updating.pending(state, step, self.gradients(flat), divisors, self.updating.fixed(step, lr))

    def _ages(self, late: Mapping[str, int]) -> Ages:
        """Say how it counts the leaves of a state."""
        if self._latest is None or self._latest.late != late:
            before, self._latest = self._latest, ages_of(late, self.paths, trained_leaves(self.plan))
            if before is None or before.relative != self._latest.relative:
                self._slices = self.updating.slices(self._latest.relative)
        return self._latest

    def metrics(self, norm: float, skipped: bool) -> UpdateMetrics:
        """The metrics of an update."""
        return UpdateMetrics(scalar(norm, self.updating.wide), torch.tensor(skipped, device="cpu"))

    @functools.cached_property
    def _shares(self) -> dict[int, float]:
        """The part of the elements of each group that this rank counts, of those of which it updates any."""
        held = [self.plan.groups[group.id] for group in self.form.groups if group.chunk]
        return {group.id: share_of(group, self.plan.mesh) for group in held}

    def gradients(self, flat: Flat) -> Gradients:
        """The chunks as what an update reads: of each group the part that this rank updates."""
        if self._made is not None and self._made[0] is flat and self._made[1] is self._slices:
            return self._made[2]
        mesh, owned = self.plan.mesh, {}
        for group in self.form.groups:
            whole, chunk = self.plan.groups[group.id], flat.held[group.id]
            owned[group.id] = chunk if whole.opt_parts == 1 else chunk[slice(*whole.own_range(mesh))]
        host = frozenset(group.id for group in self.form.groups if group.offloaded)
        made = Gradients(owned, self._slices, flat.passing & owned.keys(), update_stagings(self.plan), host)
        self._made = flat, self._slices, made
        return made


@made_on_each_rank(batches=False)
def make_update(
    opt: Optimizer,
    plan: Plan,
    *,
    clip_norm: float | Sequence[tuple[str, float | None]] | None = None,
    skip_norm: float | None = None,
    skip_limit: int = SKIPS,
    only: str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = True,
) -> UpdateStep:
    """Make the function that updates: ``update(state, grads) -> (state, metrics)`` (``optax.apply_updates``).

    The update is that of a train step: fused over leaves, with exact clipping, and applied group by group behind the
    next forward. In a function that ``fs.make_step`` runs it is a part of that step.

    Args:
        opt: the optimizer of the state.
        plan: the plan.
        clip_norm: as for ``fs.make_train_step``; norms are those of the leaves that it updates.
        skip_norm: update nothing where that norm is larger; ``metrics.skipped`` says so.
        skip_limit: updates in a row that ``skip_norm=`` also skips because the loss or the gradient is not finite; the
            next one is an error.
        only: a regular expression for whole paths: these leaves are updated. The others keep their values, their
            optimizer state and their number of updates.
        loss_scale: that of ``fs.value_and_grad(loss_scale=)``. Where the gradient norm is not finite nothing is
            updated, ``metrics.skipped`` says so, and the state that comes back has a smaller scale.
        donate: reuse the memory of the state and of the gradients.

    Raises:
        PlanError: an invalid option; an optimizer that does not fit the plan, or that carries gradients between
            steps (``fs.optim.every``).

    >>> import fshard as fs
    >>> params = {"w": torch.ones(3), "b": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> update = fs.make_update(opt, plan, only="w")
    >>> state, metrics = update(fs.init_state(plan, opt, params=params), {"w": torch.ones(3)})
    >>> state.params, metrics.grad_norm
    ({'w': tensor([0.5000, 0.5000, 0.5000]), 'b': tensor([1., 1., 1.])}, tensor(1.7321))
    """
    if not isinstance(plan, Plan) or not is_optimizer(opt):
        raise PlanError(
            f"make_update(opt, plan) takes an optimizer of fs.optim and a plan, and was given "
            f"{described(opt)} and {described(plan)}{optimizer_meant(opt)}"
        )
    wants: list[Want] = [
        ("only", only, (str, type(None)), "a regular expression for paths, or None"),
        ("loss_scale", loss_scale, (LossScale, type(None)), "fs.LossScale(...) or None"),
        ("donate", donate, bool, "True or False"),
    ]
    expect("make_update(opt, plan)", wants)
    if problems := [*late_problems(opt, Policy(), skip_norm, None, skip_limit)]:
        raise PlanError("; ".join(problems))
    if contract(opt).steps is not None:
        remedy = "Give value_and_grad accumulate=, or add gradients up with fs.tree.add."
        raise PlanError(lines("make_update takes no optimizer that carries gradients:", [repr(opt)], remedy))
    return UpdateStep(opt, plan, clip_norm, skip_norm, only, loss_scale, donate, skip_limit)
