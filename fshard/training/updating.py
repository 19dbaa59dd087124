"""The updates of a plan's leaves by an optimizer: what train steps and ``fs.make_update`` have in common."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fshard.collectives.gradient_copies import check_copies
from fshard.errors import TreeError
from fshard.optim.base import rate
from fshard.optim.contract import Contract, LearningRate
from fshard.runtime.comm import Communicator
from fshard.runtime.execution import Gradients, PendingUpdate, Rounding, partly_updated, rounded_groups
from fshard.runtime.memory.optimizer_layout import BufferLayout, UpdateSlice, shard_layouts, update_slices
from fshard.runtime.steps import widened
from fshard.runtime.steps.clip import Clip
from fshard.sharding.plan import Plan
from fshard.state.fit import check_late
from fshard.state.train_state import TrainState


@dataclass(eq=False)
class Updating:
    """An optimizer's updates of leaves of a plan.

    Attributes:
        opt: the optimizer.
        chosen: the plan in which every leaf is frozen that it does not update.
        clip: the limits of gradient norms.
        single: whether learning rates are rounded to float32, as graphs hold them.
        unproven: whether no update has been made of a model whose layers ``fs.parallel.parallelize`` cut: its plan may
            lack an entry for a leaf between cut layers, whose gradient is a sum over ranks.
    """

    opt: Contract
    plan: Plan
    chosen: Plan
    clip: Clip
    single: bool = False
    unproven: bool = field(init=False)
    _fits: object = None  # where the latest state that fits keeps the optimizer's buffers
    _rounding: Rounding | None = None  # that of the latest state
    _rated: tuple[object, Contract] | None = None  # the latest learning rate that was given, and the optimizer with it

    def __post_init__(self) -> None:
        self.unproven = self.plan.source is not None and bool(self.plan.source.cuts)

    def check(self, state: TrainState, late: Mapping[str, int] | None = None) -> None:
        """Refuse a state that this optimizer cannot update.

        Args:
            late: how many updates fewer than the oldest of them leaves have had; by default those of the state.

        Raises:
            TreeError: it holds buffers of another optimizer.
            PlanError: the optimizer cannot count the updates of each leaf; or the state is one of an outer step.
        """
        if state.past.exchanges is not None:
            state.past.exchanges.refuse()
        layouts = state.shards().layouts
        if layouts is not self._fits:
            for group, kept in self._layouts.items():
                if layouts[group] != kept:
                    raise TreeError(
                        f"the state holds {list(layouts[group])} for the optimizer, {self.opt.opt!r} keeps "
                        f"{list(kept)}, or not of the same leaves: make the state with fs.init_state(plan, opt, ...) "
                        f"and this optimizer"
                    )
            self._fits = layouts
        if late := state.late if late is None else late:
            check_late(self.opt.opt, late)

    def check_copies(self, grads: Gradients, comm: Communicator) -> None:
        """Refuse gradients of which ranks hold copies that differ: in debug mode, and where the plan is unproven.

        Raises:
            ReplicationError: on all ranks alike.
        """
        check_copies(self.chosen, grads.shards, comm)
        self.unproven = False

    def slices(self, late: Mapping[str, int]) -> dict[int, tuple[UpdateSlice, ...]]:
        """Return what it updates, by group id, where some leaves have had so many updates fewer."""
        found = update_slices(self.chosen, self.opt, self._limit, late)
        return {group: tuple([cut for cut in cuts if cut.limit >= 0]) for group, cuts in found.items()}

    def pending(
        self,
        state: TrainState,
        step: int,
        grads: Gradients,
        divisors: Sequence[float | None],
        rule: Contract,
        unit: float = 1.0,
    ) -> PendingUpdate:
        """The update of a state, as data.

        Args:
            step: the number of updates so far, for the leaves that have had most.
            grads: the gradients.
            divisors: what gradients are divided by, for each rule of clipping.
            rule: the optimizer with the learning rate of this update, see ``fixed``.
            unit: what residuals are multiplied by, so that a state can keep them.
        """
        rounding = self._rounding
        if self._rounded and (rounding is None or rounding.seed != state.seed):
            rounding = self._rounding = Rounding(self.plan, state.seed, self._rounded)
        return PendingUpdate(rule, step, grads, divisors, rounding, unit, self.plan.mesh.device)

    def fixed(self, step: int, lr: LearningRate = None) -> Contract:
        """The optimizer with the learning rates of one update, after so many updates, as numbers.

        Raises:
            PlanError: it has no learning rate for this update.
        """
        rule = self.rated(lr).at_step(step + 1)
        if self.single:
            own = rate(rule.lr, step + 1)
            single = torch.tensor(own, dtype=torch.float32, device="cpu").item()
            rule = rule if own == single else rule.with_rate(single)
        return rule

    def rated(self, lr: LearningRate) -> Contract:
        """The optimizer, with another learning rate if one is given.

        Raises:
            PlanError: it is not a learning rate, or the optimizer has not exactly one.
        """
        if lr is None:
            return self.opt
        if self._rated is None or self._rated[0] != lr:
            self._rated = dict(lr) if isinstance(lr, Mapping) else lr, self.opt.with_rate(lr)
        return self._rated[1]

    def _limit(self, path: str) -> int:
        """The number of a leaf's clipping rule; -1 of one that it does not update."""
        return self.clip.number(path) if self.chosen.leaves[path].trainable else -1

    @functools.cached_property
    def wide(self) -> torch.dtype:
        """The dtype of the gradient norm."""
        return widened([group.dtype for group in self.chosen.groups if group.trainable])

    @functools.cached_property
    def shared(self) -> dict[int, None]:
        """The groups of which each rank updates a part of its shard."""
        return partly_updated(self.chosen)

    @functools.cached_property
    def _rounded(self) -> frozenset[int]:
        """The groups whose updates are rounded stochastically."""
        return rounded_groups(self.chosen)

    @functools.cached_property
    def _layouts(self) -> dict[int, Mapping[str, BufferLayout]]:
        """Say where a state that fits keeps the optimizer's buffers, by group id."""
        mesh = self.plan.mesh
        return {group.id: shard_layouts(group, mesh, self.opt) for group in self.plan.groups if group.trainable}
