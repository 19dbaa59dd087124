"""Decisions of a train step beside its schedule: whether it updates or skips, and what its gradients become."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LossError, NonFiniteError, lines
from fshard.optim.around import CARRIED
from fshard.optim.contract import Contract
from fshard.optim.scaling import LossScale, Scale
from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.execution import Gradients, Shard
from fshard.runtime.steps.clip import Clip, divisor, norms_by_rule
from fshard.runtime.steps.consensus import FAILED, OK, Verdict
from fshard.runtime.steps.failures import raise_failure
from fshard.runtime.steps.norm_sets import NormSets
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.step_options import UpdateOptions
from fshard.runtime.steps.step_refusals import unlike_skips
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class Decisions:
    """The rules of a train step for its updates.

    Attributes:
        opt: the optimizer.
        clip: the limits of gradient norms.
        parts: microbatches of the global batch, over ranks and accumulation.
        divisor: what gradients are divided by before they are summed.
        grads: the gradients of a step.
        watched: the sets of leaves whose gradient norms the metrics have; None for none.
    """

    opt: Contract
    plan: Plan
    clip: Clip
    parts: int
    divisor: float
    grads: Gradients
    watched: NormSets | None = None

    @property
    def every(self) -> int:
        """The number of steps to an update."""
        return self.opt.steps or 1

    def updates(self, step: int) -> bool:
        """Tell whether this step, counted from 0, updates; with ``fs.optim.every`` most accumulate their gradients."""
        return (step + 1) % self.every == 0

    def accumulated(
        self, step: int, count: float, shards: Sequence[Shard], loss_scale: float
    ) -> Mapping[int, tuple[Tensor, float]]:
        """Return what earlier steps accumulated, where this one updates, and times what it is added, by group id.

        Args:
            step: the step, counted from 0.
            count: of elements whose gradients were accumulated.
            shards: what the state holds.
            loss_scale: what the loss of this step is multiplied by. What was accumulated is not.
        """
        if self.every == 1 or not self.updates(step):
            return {}
        factor = (1.0 if count else self.parts) * loss_scale / self.divisor
        return {group: (shards[group].opt[CARRIED], factor) for group in self.grads.update_slices}

    def feedback(self, summed: bool | None, loss_scale: float) -> float:
        """Return what residuals are multiplied by when they are added to gradients, before these are summed.

        Args:
            summed: whether they are of sums over the elements of ``fs.Mean``, and not of means; None for none.
            loss_scale: what the loss of this step is multiplied by.
        """
        return (1.0 if summed else self.parts) * loss_scale / self.divisor

    def summed(self, step: int, summed: bool | None, verdict: Verdict) -> bool | None:
        """Tell whether residuals after this step are of sums over elements of ``fs.Mean``; None without residuals.

        Raises:
            LossError: those before are of the other kind.
        """
        if not self.grads.left:
            return summed
        if summed is not None and summed != bool(verdict.count):
            raise _mixed(step, bool(verdict.count), "whose rounding feedback makes up for", "all steps of a run")
        return bool(verdict.count)

    def rules(self, step: int) -> int:
        """Of how many sets of leaves this step needs a norm: of each clipping rule, and of what is watched."""
        return self._clipped(step) + (len(self.watched.names) if self.watched is not None else 0)

    def rule_norms(self, step: int, norms: Mapping[int, tuple[float, Tensor]]) -> list[RuleNorms]:
        """The norms of this rank's gradients, by clipping rule and by what is watched.

        Args:
            step: the step, counted from 0.
            norms: those of all groups by their ids.
        """
        clipped = norms_by_rule(len(self.clip.rules), self.plan, self.grads) if self._clipped(step) else []
        return clipped + (self.watched.norms(self.plan, norms) if self.watched is not None else [])

    def named_norms(self, step: int, factor: float, verdict: Verdict) -> dict[str, float]:
        """The gradient norms of all ranks, by clipping rule and by what is watched; ``factor`` as for ``norm``."""
        names = [pattern for pattern, _ in self.clip.rules] if self._clipped(step) else []
        names += self.watched.names if self.watched is not None else ()
        return {name: factor * total for name, total in zip(names, verdict.rules, strict=True)}

    def _clipped(self, step: int) -> int:
        return len(self.clip.rules) if self.clip.apart and self.updates(step) else 0

    def count(self, step: int, count: float, verdict: Verdict, overflow: bool) -> float:
        """The elements whose gradients are accumulated after this step."""
        if overflow or self.every == 1:
            return count
        return 0.0 if self.updates(step) else count + verdict.count

    def mean(self, step: int, count: float, verdict: Verdict) -> float:
        """Return what sums of gradients are multiplied by to become those of the mean over all that they were taken of.

        Args:
            step: the step, counted from 0.
            count: of elements whose gradients were accumulated.
            verdict: of this step.

        Raises:
            LossError: the loss is a mean of elements in some steps between two updates, and not in others.
        """
        if self.every > 1 and step % self.every and bool(count) != bool(verdict.count):
            carried = f"whose gradients fs.optim.every({self.every}, ...) carries"
            raise _mixed(step, bool(verdict.count), carried, "all steps between two updates")
        if self.every == 1 or not self.updates(step):
            return verdict.scale
        if verdict.count:
            return verdict.scale * verdict.count / (verdict.count + count)
        return verdict.scale / self.every

    def norm(self, verdict: Verdict, scale: float) -> float:
        """The gradient norm of the mean, whose ``scale`` may be another than that of this step alone."""
        return verdict.norm if scale == verdict.scale else verdict.norm / verdict.scale * scale

    def unit(self, verdict: Verdict, divided: float) -> float:
        """Return what sums of gradients are multiplied by to be accumulated, in units free of mesh and ``accumulate=``.

        They become the gradient of this step's mean, or of the sum over its elements where the loss is an ``fs.Mean``.

        Args:
            verdict: of this step.
            divided: what gradients were divided by.
        """
        return divided if verdict.count else divided / self.parts

    def scales(self, step: int, scale: float, verdict: Verdict, unit: float = 1.0) -> list[float | None]:
        """Return what gradients are divided by, for each rule of clipping, in this step's update.

        Args:
            step: the step, counted from 0.
            scale: what sums are multiplied by to become gradients of the mean.
            verdict: of this step.
            unit: what sums are multiplied by to be accumulated.
        """
        if not self.updates(step):
            return [divisor(unit)] * len(self.clip.rules)
        clipped = verdict.rules[: len(self.clip.rules)]
        norms = [scale * total for total in clipped] if self.clip.apart else [self.norm(verdict, scale)]
        return self.clip.divisors(scale, norms)


def _mixed(step: int, weighted: bool, kept: str, remedy: str) -> LossError:
    """A loss that changes its kind while gradients of earlier steps are kept."""
    now, before = ("an fs.Mean", "a plain mean") if weighted else ("a plain mean", "an fs.Mean")
    return LossError(
        f"step {step} has {now} for a loss, and the steps before it, {kept}, had {before}: the two have no mean "
        f"together. Return the same kind in {remedy}"
    )


@dataclass
class SkipRule:
    """Skips updates: those of an overflow, those of too large a norm, and those of numbers that are not finite.

    Attributes:
        limit: how many updates in a row may be skipped since they are not finite; 0 where none may.
        largest: the norm above which updates are skipped that are finite; None for no limit.
        loss_scale: how the scale of the loss adapts; None without one.
        count: how many in a row have been skipped since they are not finite.
    """

    limit: int = 0
    largest: float | None = None
    loss_scale: LossScale | None = None
    count: int = 0

    @property
    def by_norm(self) -> bool:
        """Tell whether only the gradient norm tells if an update happens."""
        return self.loss_scale is not None or self.largest is not None

    def scale(self, scale: Scale | None) -> Scale | None:
        """The scale of the loss, of a state that has it, or not yet; None without one."""
        return None if self.loss_scale is None else scale or self.loss_scale.start()

    def overflows(self, scale: Scale | None, loss: float, norm: float) -> bool:
        """Tell whether a smaller scale may mend an update: its loss is finite, and its gradient is not."""
        rule, now = self.loss_scale, self.scale(scale)
        able = rule is not None and now is not None and now.value > rule.least
        return able and math.isfinite(loss) and not math.isfinite(norm)

    def skips(self, scale: Scale | None, loss: float, norm: float) -> bool:
        """Tell whether an update does not happen."""
        if finite(loss, norm):
            return self.largest is not None and norm > self.largest
        return self.count < self.limit or self.overflows(scale, loss, norm)

    def refuses(self, scale: Scale | None, loss: float, norm: float) -> bool:
        """Tell whether an update is an error: not finite, and not skipped."""
        return not finite(loss, norm) and not self.skips(scale, loss, norm)

    def note(self, scale: Scale | None, loss: float, norm: float) -> None:
        """Note an update that was made or skipped."""
        if not self.overflows(scale, loss, norm):
            self.count = 0 if finite(loss, norm) else self.count + 1

    def after(self, scale: Scale | None, overflow: bool) -> Scale | None:
        """The scale of the loss after an update that was made, or that has overflowed."""
        now = self.scale(scale)
        return scale if self.loss_scale is None or now is None else self.loss_scale.after(now, finite=not overflow)

    def not_finite(self, verdict: Verdict, step: int, place: Sequence[str], early: bool = False) -> NonFiniteError:
        """The error of a gradient, or a loss, that is not finite.

        Args:
            verdict: of the step.
            step: the number of steps before it.
            place: the leaves that it is found in.
            early: whether the gradient was applied in the backward.
        """
        after = "parameters were updated with it" if early else "nothing was updated and the state can be used again"
        losses = [f"rank {rank}: its own loss is {row[1]}" for rank, row in enumerate(verdict.told) if len(row) > 1]
        bad = [line for line, row in zip(losses, verdict.told, strict=False) if not math.isfinite(row[1])]
        before = f"{self.count} before it were not finite, and were skipped: skip_limit={self.limit}"
        found = [f"step {step + 1}", *[before] * bool(self.count), *place, *(bad if len(losses) > 1 else ())]
        return NonFiniteError(
            lines(
                f"the gradient norm is {verdict.norm} and the loss {verdict.loss}: {after}.",
                found,
                "Look for inf or nan in the batch, for a count of 0 or an empty batch, or lower the learning rate",
            )
        )


def skip_rule(options: UpdateOptions) -> SkipRule:
    """The rule of ``skip_norm=``, ``skip=``, ``skip_limit=`` and ``loss_scale=``."""
    asked = options.skip_norm is not None or options.skip is not None
    return SkipRule(options.skip_limit if asked else 0, options.skip_norm, options.loss_scale)


def finite(loss: float, norm: float) -> bool:
    """Tell whether a loss and the norm of its gradient are finite."""
    return math.isfinite(loss) and math.isfinite(norm)


def skipped_by(skip: Callable[[Any], bool] | None, metrics: Any, comm: Communicator) -> bool:
    """Tell whether all ranks skip an update of these metrics, as ``skip=`` says. Collective if it was given.

    Raises:
        LossError: ranks do not agree.
        PeerError: the function failed on another rank; or what it raised on this one.
    """
    if skip is None:
        return False
    mine, failure = 0, None
    try:
        mine = int(bool(skip(metrics)))
    except Exception as error:
        mine, failure = 2, error
    said = [mine] if comm.size == 1 else exchange(comm, torch.tensor([mine], device="cpu")).flatten().tolist()
    if 2 in said:
        raise_failure(comm, failure, [FAILED if what == 2 else OK for what in said])
    if len(set(said)) > 1:
        raise unlike_skips(said)
    return bool(said[0])
