"""The numbers that all ranks learn at the end of a step function: losses, auxiliary means and norms."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fshard.parts.replay import Replay
from fshard.parts.step_arguments import FunctionResult
from fshard.parts.step_values import Bank, Number, Updated, number_of
from fshard.parts.told_rates import TOLD, check_rates
from fshard.runtime.comm import Communicator
from fshard.runtime.steps import Verdict, scalar
from fshard.runtime.steps.addresses import where
from fshard.runtime.steps.consensus import joint_norm, root


class UpdateNumbers(NamedTuple):
    """The numbers of an update.

    Attributes:
        norms: of the sums of gradients, by clipping rule.
        scale: what these sums are multiplied by.
        norm: of the gradients.
    """

    norms: Sequence[float]
    scale: float
    norm: float


class Numbers:
    """The numbers that all ranks have learned at the end of a step.

    Args:
        replay: the step.
        result: what its function returned.
        sums: of what ranks have brought, in the order of ``Replay.tally``.
    """

    def __init__(self, replay: Replay, result: FunctionResult, sums: Sequence[float]) -> None:
        self.replay, found = replay, iter(sums)
        self.losses: list[tuple[float, float]] = []
        self.means: list[list[float]] = []
        for means in replay.step.means:
            self.losses.append((next(found), next(found)))
            pairs = [(next(found), next(found)) for _ in range(means)]
            self.means.append([total / count if count else total * math.inf for total, count in pairs])
        self.updates = [update for final in result.finals for update in final.updates]
        self.of_update: dict[Updated, UpdateNumbers] = {}
        self.rates: dict[Updated, list[float]] = {}
        for update in self.updates:
            self.rates[update] = [next(found) for _ in range(TOLD)]
            self.of_update[update] = self._read(update, [next(found) for _ in update.part.clip.rules])

    def _read(self, updated: Updated, squares: Sequence[float]) -> UpdateNumbers:
        """The numbers of an update, of the squared norms of sums of gradients."""
        scale = 1.0
        if isinstance(updated.grads, Bank):
            scale = self.replay.scale(updated.grads.number, self.losses[updated.grads.number][1])
        return UpdateNumbers([*map(root, squares)], scale, scale * joint_norm(squares))

    def norm(self, updated: Updated) -> float:
        """The norm of the gradients of an update."""
        return self.of_update[updated].norm

    def overflows(self, updated: Updated) -> bool:
        """Tell whether a smaller loss scale may mend the gradients of an update."""
        overflows: bool = self._finite(updated) and updated.part.overflows(updated.state, self.norm(updated))
        return overflows

    def skips(self, updated: Updated) -> bool:
        """Tell whether an update does not happen."""
        part, state = updated.part, updated.state
        skips: bool = part.skips(state, self.norm(updated)) if self._finite(updated) else part.streak.skips(False)
        return skips

    def _finite(self, updated: Updated) -> bool:
        """Tell whether the loss is finite whose gradients an update applies."""
        return not isinstance(updated.grads, Bank) or math.isfinite(self._loss(updated.grads.number))

    def note(self) -> None:
        """Note, once the step is certain, which updates were finite."""
        for updated in self.updates:
            updated.part.note(updated.state, self.norm(updated) if self._finite(updated) else math.nan)

    def check(self, control: Communicator) -> None:
        """Refuse updates whose gradients, or the losses of these, are not finite. Collective if they are not.

        Raises:
            NonFiniteError: on all ranks alike.
            ReplicationError: ranks give different learning rates.
        """
        for updated in self.updates:
            check_rates(updated, self.rates[updated])
            norm = self.norm(updated)
            if self.skips(updated) or self._finite(updated) and math.isfinite(norm):
                continue
            part, loss, own, origin = updated.part, math.nan, 0.0, ""
            if isinstance(updated.grads, Bank):
                loss, own = self._loss(updated.grads.number), self.replay.own_loss(updated.grads.number)
                origin = self.replay.origin(updated.grads.number)
            place = where(part.plan, part.gradients(updated.grads).shards, control, own, origin)
            raise part.not_finite(Verdict((), loss, norm, 1.0), updated.state.step, place)

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
        known: float | None = self.replay.numbers.get(("norm", number.of, 0))
        if known is not None:
            return known
        return self.norm(number.of)
