"""The passes of all kinds of steps, on this rank: a forward and a backward for each microbatch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.model.precision import note_outside
from fshard.runtime.engine.batch import marks_undone
from fshard.runtime.engine.engine import Engine
from fshard.runtime.engine.loss_result import (
    Loss,
    check_data,
    check_differentiable,
    check_means,
    detached,
    left_by_trace,
    read_loss,
)
from fshard.runtime.steps.finder import Fn
from fshard.runtime.steps.records import PassResult
from fshard.runtime.steps.step_refusals import different_microbatches, weighted_in_backward
from fshard.schedule.ops import ROOT
from fshard.torch_internals import DataDependentOutputException

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Passes:
    """The passes of a function through microbatches.

    Attributes:
        fn: the loss function, or for evaluation any function.
        train: which of the two it is.
        in_backward: whether updates happen in the backward.
        divisor: what gradients are divided by before they are summed.
    """

    fn: Fn
    train: bool
    in_backward: bool
    divisor: float

    def run(
        self,
        engine: Engine,
        sink: Any,
        parts: Sequence[Any],
        scale: float | Tensor = 1.0,
        opened: Context = nullcontext,
        watch: Context = nullcontext,
    ) -> PassResult:
        """Run the function on each microbatch.

        Args:
            engine: runs its units.
            sink: an executor, or its part of one, which is told how far the pass is.
            parts: the microbatches.
            scale: what the loss is multiplied by for the backward; in a graph the seed of the backward, 0-dim.
            opened: the context of the user's code, where signals are let through.
            watch: a context around the function.
        """
        losses: list[tuple[Tensor, Tensor | float]] = []
        found: list[Any] = []
        weighted: bool | None = None
        try:
            # Autocast keeps casts of weights by the leaf's identity, and slot leaves outlive their values.
            torch.clear_autocast_cache()
            # Autograd would run the backward of a device on that device's thread: without the context of this one, with
            # sequence numbers of its own, and beside the drain after a failure.
            with torch.autograd.set_multithreading_enabled(False), marks_undone(parts):
                for index, part in enumerate(parts):
                    sink.begin_microbatch(index)
                    engine.start(sink)
                    sink.reach("forward", ROOT, 0)
                    sink.settle()
                    if self.train:
                        with watch(), opened():
                            loss = read_loss(self._called(engine, part))
                        self._check(loss, weighted, found)
                        weighted = loss.count is not None
                        seed = self._seed(loss.total, scale)
                        with opened():
                            engine.differentiate(loss.total, seed)
                        losses.append((loss.total.detach(), 1.0 if loss.count is None else loss.count))
                        found.append(tree.mapped(detached, loss.aux) if loss.aux else loss.aux)
                    else:
                        with torch.no_grad(), watch(), opened():
                            found.append(self._called(engine, part))
                        check_means(found[-1])
                        sink.reach("backward", ROOT, 0)
                    sink.end_microbatch()
        finally:
            engine.stop()
        return PassResult(losses, found, bool(weighted))

    def _seed(self, total: Tensor, scale: float | Tensor) -> Tensor:
        """The gradient of a loss from which its backward starts."""
        if isinstance(scale, Tensor):
            return scale.to(total.dtype, copy=True).expand_as(total)
        return torch.full_like(total, scale / self.divisor)

    def _called(self, engine: Engine, part: Any) -> Any:
        """Return what the function returns."""
        try:
            result = engine.run(self.fn, part, self.train)
        except DataDependentOutputException as error:
            raise left_by_trace() from error
        except Exception as error:
            note_outside(error, part, engine.slots.by_path)
            raise
        check_data(result)
        return result

    def _check(self, loss: Loss, weighted: bool | None, before: Sequence[Any]) -> None:
        """Refuse a loss that cannot be differentiated, or is unlike those of the microbatches before."""
        check_differentiable(loss)
        mean = loss.count is not None
        if mean and self.in_backward:
            raise weighted_in_backward()
        if before and (weighted is not mean or _spec(before[:1]) != _spec([loss.aux])):
            raise different_microbatches()


def _spec(values: Any) -> Any:
    return tree.flatten(values)[1]
