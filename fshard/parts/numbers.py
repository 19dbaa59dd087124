"""The numbers that all ranks learn at the end of a step function: losses, auxiliary means and norms."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fshard.errors import NonFiniteError
from fshard.optim.scaling import Scale
from fshard.parts.assemble import Assembled
from fshard.parts.replay import Replay
from fshard.parts.returned_values import plain_columns
from fshard.parts.step_arguments import FunctionResult
from fshard.parts.step_values import Bank, Number, Updated, number_of
from fshard.parts.told_rates import TOLD, check_rates
from fshard.runtime.comm import Communicator
from fshard.runtime.engine.plain_values import PlainTold
from fshard.runtime.steps import scalar
from fshard.runtime.steps.addresses import where
from fshard.runtime.steps.consensus import Columns, JointRow, check_counts, quotient
from fshard.runtime.steps.decide import skipped_by


class StepTally(NamedTuple):
    """The numbers that one rank brings to the end of a step function.

    Attributes:
        sums: those that are summed over ranks, in the order of ``Replay.tally``.
        copies: marks of the copies that it holds.
        plain: the plain values that its function returned.
    """

    sums: Sequence[float] = ()
    copies: Sequence[float] = ()
    plain: PlainTold = PlainTold()

    def columns(self, step: Assembled, busy: float) -> Columns:
        """The numbers by name."""
        sums, copies = (self.sums, step.width), (self.copies, len(step.copied))
        return {"sums": sums, "copies": copies, **plain_columns(self.plain), "busy": ([busy], 1)}


class UpdateNumbers(NamedTuple):
    """The numbers of an update.

    Attributes:
        squares: of the norms of sums of gradients, by set of leaves.
        scale: what these sums are multiplied by.
        loss: that of their pass; 0 of gradients of no pass.
    """

    squares: Sequence[float]
    scale: float
    loss: float


class Numbers:
    """The numbers that all ranks have learned at the end of a step.

    Args:
        replay: the step.
        result: what its function returned.
        row: the ``columns`` of all ranks.

    Raises:
        LossError: a rank's count is negative; on all ranks alike.
    """

    def __init__(self, replay: Replay, result: FunctionResult, row: JointRow) -> None:
        sums, pairs = row.summed("sums"), replay.step.pairs
        if any([count < 0 for count in sums[1:pairs:2]]):
            check_counts([*zip(*row.told("sums"), strict=True)][1:pairs:2])
        self.replay, found = replay, iter(sums)
        self.losses: list[tuple[float, float]] = []
        self.means: list[list[float]] = []
        for each in replay.step.recorded.passes:
            self.losses.append((next(found), next(found)))
            self.means.append([quotient(next(found), next(found)) for _ in range(each.named[0])])
        self.refused: list[Updated] = []  # those that ``skip=`` says no to
        self.updates = [update for final in result.finals for update in final.updates]
        self.of_update: dict[Updated, UpdateNumbers] = {}
        self.rates: dict[Updated, list[float]] = {}
        for update in self.updates:
            self.rates[update] = [next(found) for _ in range(TOLD)]
            self.of_update[update] = self._read(update, [next(found) for _ in range(update.part.norms.sets)])

    def _read(self, updated: Updated, squares: Sequence[float]) -> UpdateNumbers:
        """The numbers of an update, of the squared norms of sums of gradients."""
        if not isinstance(updated.grads, Bank):
            return UpdateNumbers(squares, 1.0, 0.0)
        number = updated.grads.number
        return UpdateNumbers(squares, self.replay.scale(number, self.losses[number][1]), self._loss(number))

    def norm(self, updated: Updated, at: int = 0) -> float:
        """A norm of the gradients of an update."""
        found = self.of_update[updated]
        norm: float = found.scale * updated.part.norm(updated.state, found.squares, at)
        return norm

    def _facts(self, updated: Updated) -> tuple[Scale | None, float, float]:
        """Return what decides whether an update happens."""
        return updated.state.scale, self.of_update[updated].loss, self.norm(updated)

    def overflows(self, updated: Updated) -> bool:
        """Tell whether a smaller loss scale may mend the gradients of an update."""
        overflows: bool = updated.part.rule.overflows(*self._facts(updated))
        return overflows

    def skips(self, updated: Updated) -> bool:
        """Tell whether an update does not happen."""
        skips: bool = updated.part.rule.skips(*self._facts(updated))
        return skips or updated in self.refused

    def note(self) -> None:
        """Note, once the step is certain, which updates were finite."""
        for updated in self.updates:
            updated.part.rule.note(*self._facts(updated))

    def check(self, control: Communicator, debug: bool) -> None:
        """Refuse updates that are not finite, or of copies that differ, and ask ``skip=`` about the others. Collective.

        Raises:
            NonFiniteError: gradients, or the loss of these, are not finite; on all ranks alike.
            LossError, PeerError: as ``skipped_by``.
            ReplicationError: ranks give different learning rates, or hold copies of gradients that differ.
        """
        for updated in self.updates:
            check_rates(updated, self.rates[updated])
            part = updated.part
            if part.rule.refuses(*self._facts(updated)):
                raise self._not_finite(updated, control)
            if self.skips(updated):
                continue
            if debug or part.updating.unproven:
                part.updating.check_copies(part.gradients(updated.grads), control)
            if skipped_by(part.skip, self._metrics(updated), control):
                self.refused.append(updated)

    def _metrics(self, updated: Updated) -> Any:
        """The metrics of an update, as ``skip=`` reads them."""
        found = self.of_update[updated]
        return updated.part.metrics(updated.state, [found.scale**2 * square for square in found.squares])

    def _not_finite(self, updated: Updated, control: Communicator) -> NonFiniteError:
        """The error of an update whose gradients, or the loss of these, are not finite. Collective."""
        part, loss, own, origin = updated.part, math.nan, 0.0, ""
        if isinstance(updated.grads, Bank):
            loss, own = self._loss(updated.grads.number), self.replay.own_loss(updated.grads.number)
            origin = self.replay.origin(updated.grads.number)
        place = where(part.plan, part.gradients(updated.grads).shards, control, own, origin)
        error: NonFiniteError = part.not_finite((loss, self.norm(updated)), updated.state.step, place)
        return error

    def _loss(self, number: int) -> float:
        total, count = self.losses[number]
        return total / count if count else math.nan

    def named(self, leaf: Any) -> Any:
        """A leaf of the metrics: a number of the step by its value."""
        number = number_of(leaf)
        return leaf if number is None else scalar(self._value(number), number.dtype)

    def _value(self, number: Number) -> float:
        if number.kind == "loss":
            return self._loss(number.of)
        if number.kind == "mean":
            means: list[float] = self.means[number.of]
            return means[number.at]
        if number.kind == "skipped":
            return float(number.of in self.updates and self.skips(number.of))
        known: float | None = self.replay.numbers.get(("norm", number.of, number.at))
        return self.norm(number.of, number.at) if known is None else known
