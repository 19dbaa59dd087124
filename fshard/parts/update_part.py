"""``fs.make_update``: the other part of a step. Gradients become an update that the next forward hides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fshard import tree
from fshard.errors import NonFiniteError, TreeError
from fshard.optim.around import CARRIED
from fshard.optim.base import Optimizer, rate
from fshard.optim.contract import LearningRate
from fshard.parts.copy_marks import Marks, axes_of_copies
from fshard.parts.leaf_ages import Ages, ages_of, trained_leaves
from fshard.parts.step_values import PART, running_of
from fshard.parts.update_metrics import UpdateMetrics, UpdateNorms
from fshard.runtime.comm import Facts, collective_call, digest, mesh_communicator, refuse_nested
from fshard.runtime.execution import Gradients, PendingUpdate, Several, Shards, held_back, parts_of
from fshard.runtime.memory.memory_spaces import update_stagings
from fshard.runtime.memory.optimizer_layout import UpdateSlice
from fshard.runtime.steps import refuse_transforms, scalar
from fshard.runtime.steps.addresses import here, where
from fshard.runtime.steps.clip import divisor
from fshard.runtime.steps.consensus import FAILED, OK, Verdict, exchange_row
from fshard.runtime.steps.decide import finite, skip_rule, skipped_by
from fshard.runtime.steps.failures import raise_failure
from fshard.runtime.steps.handshake import Intent, Terms, agree
from fshard.runtime.steps.norm_sets import watched
from fshard.runtime.steps.readings import Reading, RuleNorms, answers, squares
from fshard.runtime.steps.step_options import UpdateOptions
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
        chosen: the plan in which every leaf is frozen that it does not update.
        form: the form of the gradients.
        rule: which updates do not happen.
        norms: the norms of its gradients.
    """

    def __init__(self, opt: Optimizer, plan: Plan, options: UpdateOptions, only: str | None) -> None:
        self.plan, self.only, self.donate = plan, only, options.donate
        self.rule, self.skip = skip_rule(options), options.skip
        checked, self.chosen = check_optimizer(plan, opt), plan if self.only is None else plan.only(self.only)
        self.updating = Updating(checked, plan, self.chosen, options.clip)
        self.paths = tuple(path for path, leaf in self.chosen.leaves.items() if leaf.trainable)
        self.form = form_of(self.chosen, self.paths, "the gradients of the leaves that it updates")
        watch = watched(options.norms, self.chosen, Gradients({}, {}, frozenset()))
        self.norms = UpdateNorms(plan, self.chosen, options.clip, watch)
        self.equal = Equal(plan, {"update": only} | options.told(), opt)
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
            ReplicationError: ranks give different learning rates, or copies of gradients differ at the first update
                of a model whose layers ``fs.parallel.parallelize`` cut.
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
        agree(comm, Terms(PART, intent, facts=facts), failure)
        assert flat is not None
        if state.stale:
            complete(state, self.plan.mesh)
        if self.every > 1:
            flat = Flat(flat.form, {group: chunk.clone() for group, chunk in flat.chunks.items()})
        summed = self._summed(state, flat)
        state.memory.note_compared()
        now = state.scale, 0.0, self.norm(state, summed)
        if self.rule.refuses(*now):
            raise self.not_finite((math.nan, now[2]), state.step, where(self.plan, self.gradients(flat).shards, comm))
        if self.updating.unproven and finite(*now[1:]):
            self.updating.check_copies(self.gradients(flat), comm)
        metrics, overflow = self.metrics(state, summed), self.rule.overflows(*now)
        skips = self.rule.skips(*now) or skipped_by(self.skip, metrics, comm)
        self.rule.note(*now)
        if skips:
            return self.after(state, True, overflow), replace(metrics, skipped=torch.tensor(True, device="cpu"))
        following = self.conclude(state, flat, summed, lr)
        if state.memory.lent and following.stale:  # in a step function, states can be read without fs.settle
            complete(following, self.plan.mesh)
        return following, metrics

    @property
    def every(self) -> int:
        """The number of calls to an update."""
        return self.updating.opt.steps or 1

    @property
    def may_skip(self) -> bool:
        """Tell whether only the metrics tell if the update happens."""
        return self.rule.by_norm or self.skip is not None

    def after(self, state: TrainState, skipped: bool, overflow: bool = False) -> TrainState:
        """A state after this update: its numbers, and not its memory."""
        scale, step, late = state.scale, state.step, dict(state.late)
        if overflow or not skipped:
            scale = self.rule.after(scale, overflow)
        if not skipped:
            ages = self._ages(state.late)
            step, late = step + ages.after.more, ages.after.late
        return replace(state, step=step, late=late, scale=scale)

    def _summed(self, state: TrainState, flat: Flat) -> Sequence[float]:
        """Ask all ranks for the squares of the norms of gradients."""
        comm, failure, mine, own = mesh_communicator(self.plan.mesh), None, list[float](), list[float]()
        over, marks = axes_of_copies([self.plan]) if comm.size > 1 else [], Marks()
        try:
            if over:
                marks.note("gradients", flat)
            if self.every > 1:
                self.collect(state, flat, state.applied())
            mine, own = answers([squares(self.rule_norms(flat)), Reading(marks.values(over), list)])
        except Exception as error:  # a device reports late what went wrong there
            failure = error
        columns = {"squares": (mine, self.norms.sets), "copies": (own, len(over))}
        row = exchange_row(comm, OK if failure is None else FAILED, columns)
        if any(row.status):
            raise_failure(comm, failure, row.status)
        marks.check(comm, self.plan.mesh, over, row.told("copies"))
        return row.summed("squares")

    def rule_norms(self, flat: Flat) -> list[RuleNorms]:
        """The norms of this rank's gradients, by set."""
        if self._latest is None:
            self._ages({})
        return self.norms.of(self.gradients(flat), len(flat.form.order.paths) <= len(self.paths))

    def collect(self, state: TrainState, flat: Flat, shards: Shards) -> None:
        """Add what calls before this one carried to the gradients of a call that updates.

        Args:
            state: the state as the update was given it.
            flat: the gradients, which nobody else reads.
            shards: those of the state, with no update waiting.
        """
        if self.updates(state):
            gradients = self.gradients(flat)
            for group, cuts in gradients.update_slices.items():
                held = shards[group].slices(cuts)
                for grad, (_, kept) in zip(gradients.slices(group), held, strict=True):
                    grad.add_(kept[CARRIED].to(grad.device))

    def updates(self, state: TrainState) -> bool:
        """Tell whether a call on this state updates, and does not only carry gradients."""
        step: int = state.step - self._ages(state.late).least + 1
        return step % self.every == 0

    def share(self, state: TrainState) -> float:
        """Return what gradients that hold carried ones are multiplied by: they are sums over calls then."""
        return 1.0 / self.every if self.updates(state) else 1.0

    def norm(self, state: TrainState, squares: Sequence[float], at: int = 0) -> float:
        """A norm of the metrics, of the squares over all ranks; see ``UpdateNorms.norm``."""
        return self.share(state) * self.norms.norm(squares, at)

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

    def conclude(self, state: TrainState, flat: Flat, squares: Sequence[float], lr: LearningRate) -> TrainState:
        """The next state, whose update waits.

        Args:
            flat: the gradients.
            squares: of their norms, over all ranks.
            lr: the learning rate, if it is not the optimizer's own.
        """
        pending = self.pending(state, flat, self.norms.clipped(squares), 1.0, lr)
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

    def not_finite(self, found: tuple[float, float], step: int, place: Sequence[str]) -> NonFiniteError:
        """The error of a loss, or a gradient norm, that is not finite: with the step after this one, and the place."""
        return self.rule.not_finite(Verdict((), *found, 1.0), step, place)

    def check_here(self, state: TrainState, flat: Flat, norm: float) -> None:
        """Refuse gradients that are read within a step and are not finite.

        Raises:
            NonFiniteError: with what this rank holds of them.
        """
        if not math.isfinite(norm):
            place = here(self.plan, self.gradients(flat).shards)
            raise self.not_finite((math.nan, norm), state.step, [place] * bool(place))

    def pending(
        self, state: TrainState, flat: Flat, norms: Sequence[float], scale: float, lr: LearningRate
    ) -> PendingUpdate:
        """The update, as data.

        Args:
            state: the state as the update was given it.
            flat: the gradients.
            norms: of the gradients as they lie, by clipping rule.
            scale: what these are multiplied by to become those of the mean.
            lr: the learning rate, if it is not the optimizer's own.
        """
        ages, scale = self._ages(state.late), scale * self.share(state)
        divisors: list[float | None] = [divisor(scale)] * len(norms)
        if self.updates(state):
            divisors = self.updating.clip.divisors(scale, [scale * norm for norm in norms])
        step = state.step - ages.least
        return self.updating.pending(state, step, self.gradients(flat), divisors, self.updating.fixed(step, lr))

    def _ages(self, late: Mapping[str, int]) -> Ages:
        """Say how it counts the leaves of a state."""
        if self._latest is None or self._latest.late != late:
            before, self._latest = self._latest, ages_of(late, self.paths, trained_leaves(self.plan))
            if before is None or before.relative != self._latest.relative:
                self._slices = self.updating.slices(self._latest.relative)
        return self._latest

    def metrics(self, state: TrainState, squares: Sequence[float]) -> UpdateMetrics:
        """The metrics of an update, of the squares of its norms over all ranks."""
        norm, *more = [self.norm(state, squares, at) for at in range(len(self.norms.names) + 1)]
        wide = self.updating.wide
        named = {name: scalar(one, wide) for name, one in zip(self.norms.names, more, strict=True)}
        return UpdateMetrics(scalar(norm, wide), torch.tensor(False, device="cpu"), named)

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
