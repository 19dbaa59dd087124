"""Decisions of a train step beside its schedule: whether it updates or skips, and what its gradients become."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard.errors import LossError, NonFiniteError, lines
from fshard.optim.around import CARRIED
from fshard.optim.contract import Contract
from fshard.runtime.comm import Communicator
from fshard.runtime.execution import Gradients, Shard
from fshard.runtime.steps.clip import Clip, divisor, norms_by_rule, skipped
from fshard.runtime.steps.consensus import FAILED, OK, Verdict
from fshard.runtime.steps.failures import raise_failure
from fshard.runtime.steps.norm_sets import NormSets
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.step_refusals import unlike_skips
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class Decisions:
    """The rules of a train step for its updates.

    Attributes:
        opt: the optimizer.
        plan: the plan.
        clip: the limits of gradient norms.
        skip_norm: the gradient norm above which a step is skipped.
        skip: says of a step's metrics whether it is skipped.
        parts: microbatches of the global batch, over ranks and accumulation.
        divisor: what gradients are divided by before they are summed.
        grads: the gradients of a step.
        watched: the sets of leaves whose gradient norms the metrics have; None for none.
    """

    opt: Contract
    plan: Plan
    clip: Clip
    skip_norm: float | None
    skip: Callable[[Any], bool] | None
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

    def skips(self, metrics: Any, comm: Communicator) -> bool:
        """Tell whether all ranks skip this step. Collective over the control communicator if ``skip=`` was given.

        Raises:
            LossError: ranks do not agree.
            PeerError: the function failed on another rank; or what it raised on this one.
        """
        if self.skip_norm is not None and metrics.grad_norm.item() > self.skip_norm:
            return True
        if self.skip is None:
            return False
        said, failure = skipped(comm, self.skip, metrics)
        if 2 in said:
            raise_failure(comm, failure, [FAILED if what == 2 else OK for what in said])
        if len(set(said)) > 1:
            raise unlike_skips(said)
        return bool(said[0])

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
class Streak:
    """Updates in a row that are skipped since they are not finite.

    Attributes:
        limit: how many may be; 0 where none may.
        largest: the norm above which updates are skipped that are finite; None for no limit.
        count: how many have been skipped.
    """

    limit: int
    largest: float | None = None
    count: int = 0

    def skips(self, finite: bool, norm: float = 0.0) -> bool:
        """Tell whether an update is skipped, for either reason."""
        large = self.largest is not None and norm > self.largest
        return large if finite else self.count < self.limit

    def note(self, finite: bool) -> None:
        """Note an update that was made or skipped."""
        self.count = 0 if finite else self.count + 1

    def told(self) -> list[str]:
        """A line about the updates skipped before one that is an error; none where there were none."""
        return [f"{self.count} before it were not finite, and were skipped: skip_limit={self.limit}"] * bool(self.count)


def not_finite(verdict: Verdict, early: bool, where: Sequence[str] = ()) -> NonFiniteError:
    """A gradient, or a loss, that is not finite.

    Args:
        verdict: of the step.
        early: whether the gradient was applied in the backward.
        where: the step, and the leaves that it is found in.
    """
    after = "parameters were updated with it" if early else "nothing was updated and the state can be used again"
    losses = [f"rank {rank}: its own loss is {row[1]}" for rank, row in enumerate(verdict.told) if len(row) > 1]
    bad = [line for line, row in zip(losses, verdict.told, strict=False) if not math.isfinite(row[1])]
    return NonFiniteError(
        lines(
            f"the gradient norm is {verdict.norm} and the loss {verdict.loss}: {after}.",
            [*where, *(bad if len(losses) > 1 else ())],
            "Look for inf or nan in the batch, for a count of 0 or an empty batch, or lower the learning rate",
        )
    )
