"""Finding the program of a function: by a trace, or from a step that ran on demand."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fshard.runtime.engine.batch import microbatches, shapes, signature
from fshard.runtime.engine.remat_rules import Remat
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.trace_program import trace
from fshard.runtime.steps.programs import Programs

Fn = Callable[..., Any]

MANY = 32
"""Signatures of batches that may be met before a warning says so."""


class Finder:
    """Finds the program of a function for each signature of its batches.

    Args:
        fn: the loss function, or for evaluation any function.
        programs: for what it is found.
    """

    def __init__(self, fn: Fn, programs: Programs) -> None:
        self.fn, self.programs = fn, programs
        self._found: dict[Hashable, ProgramTrace | None] = {}
        self._shapes: dict[Hashable, Sequence[torch.Size]] = {}  # of the batches that were traced

    def look(self, batch: Any) -> ProgramTrace | None:
        """The program for batches like this one; None if only a real run can tell."""
        key, programs = signature(batch), self.programs
        if key not in self._found:
            self._count()
            self._shapes[key] = shapes(batch)
            found = self._found[key] = self.again(batch, programs.remat)
            if found is not None:
                units = {*found.program.reads, *(group.unit for group in programs.plan.groups)}
                programs.remat.check(units, programs.plan.leaves)
        found = self._found[key]
        if found is not None and found.needs and (chosen := programs.remat_of(found)) != found.remat:
            self._found[key] = self.again(batch, chosen)
        return self._found[key]

    def again(self, batch: Any, remat: Remat) -> ProgramTrace | None:
        """The program for batches like this one with other units computed again, traced anew."""
        programs = self.programs
        part = microbatches(batch, programs.accumulate, programs.plan.batch)[0]
        return trace(self.fn, programs.plan, part, programs.train, remat)

    def flops(self, batch: Any) -> int | None:
        """Floating-point operations of the model in a run on this batch, on this rank.

        None where no trace has counted them: the program depends on values of tensors, or the batch that was traced
        had other shapes.
        """
        key = signature(batch)
        found = self._found.get(key)
        if found is None or found.flops is None or self._shapes.get(key) != shapes(batch):
            return None
        return found.flops * self.programs.accumulate

    def learn(self, batch: Any, found: ProgramTrace) -> None:
        """Keep what a run on demand has found for batches like this one."""
        self._found[signature(batch)] = found

    def _count(self) -> None:
        if len(self._found) == MANY:
            warnings.warn(
                f"{MANY} batches differed in values that are not tensors, and each was traced anew: pass values that "
                f"change from step to step as tensors",
                stacklevel=5,
            )
        if len(self._found) > 4 * MANY:
            self._found.clear()
            self._shapes.clear()
