"""Running a loss of single samples on a schedule: the backward leaves a tape, and sums of it come after all norms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.engine import Remat
from fshard.runtime.engine.batch import microbatches
from fshard.runtime.engine.engine import Engine, Sink, Traits
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.engine.remat_rules import NO_REMAT, reentrant_refused
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.executor import OnDemand
from fshard.runtime.execution.trace_program import Watched, trace_in
from fshard.runtime.steps.finder import Finder
from fshard.runtime.steps.programs import Programs
from fshard.schedule.ops import ROOT, Call
from fshard.sharding.plan import Plan
from fshard.transform.sample_tape import Place, SampleTape

Weigh = Callable[[], Tensor]
"""Gives the factor of each sample's gradient, when all gradients are on the tape."""


class SampleEngine(Engine):
    """Runs the units of a loss of single samples, whose gradients go to a tape.

    Args:
        plan: the plan.
        sink: receives sums of gradients.
        remat: which units are computed again in their backward.
        traits: what is known of the program.
        tape: the tape.
        weigh: gives the factors of a sum that goes to the sink; None where nobody wants one.
        paths: the leaves of which gradients are taken.
    """

    def __init__(
        self,
        plan: Plan,
        sink: Sink,
        remat: Remat = NO_REMAT,
        traits: Traits | None = None,
        *,
        tape: SampleTape,
        weigh: Weigh | None = None,
        paths: frozenset[str],
    ) -> None:
        super().__init__(plan, sink, remat, *[] if traits is None else [traits])
        self.tape, self.weigh = tape, weigh
        self.entered: list[Call] = []
        for path in paths:  # a frozen group has no gradient to reduce, and its samples have theirs
            self.slots.by_path[path].requires_grad_()

    @property
    def place(self) -> Place:
        """The call of a unit that runs."""
        return self.inside, self.counts.get(self.inside, 1) - 1

    def differentiate(self, total: Tensor, seed: Tensor) -> None:
        """Run the backward from a loss, then hand the sums of weighted gradients to the sink, call by call."""
        executor = self.executor
        assert executor is not None
        self.differentiating, self.entered = True, []
        with reentrant_refused():
            torch.autograd.backward([total], [torch.ones_like(total)])
        self._leave()
        factor = None if self.weigh is None else self.weigh()
        if factor is not None and not isinstance(executor, OnDemand):
            for call in self.entered:
                executor.reach("weight", call.unit, call.index)
                self._sum((call.unit, call.index), factor)
                executor.settle()
        executor.reach("backward", ROOT, 0)
        for place in list(self.tape.calls) if factor is not None else ():
            self._sum(place, factor)
        self.executor = None

    def enter_backward(self, name: str, index: int) -> bool:
        """The gradient of an output of a unit is complete; see ``Engine``."""
        entered = super().enter_backward(name, index)
        if entered:
            self.entered.append(Call(name, index))
        return entered

    def _leave(self) -> None:
        """The backward of the unit under way is over."""
        if self.under_way:
            self.under_way = ""
            assert self.executor is not None
            self.executor.settle()

    def _sum(self, place: Place, factor: Any) -> None:
        """Hand on the sum of what a call has left of the samples' gradients."""
        found = self.tape.summed(place, self.slots.by_path, factor)
        by_group: dict[int, dict[int, Tensor]] = {}
        for path, grad in found.items():
            group, number = self.plan.places()[path]
            by_group.setdefault(group.id, {})[number] = grad
        for group_id, grads in by_group.items():
            numbers = sorted(grads)
            self.sink(group_id, numbers, [grads[n] for n in numbers])


class SampleFinder(Finder):
    """Finds the program of a loss of single samples.

    Args:
        fn: the loss of all samples.
        programs: for what it is found.
        engine: makes the engine of a trace.
        parted: whether sums come after the backward.
    """

    def __init__(self, fn: Any, programs: Programs, engine: Any, parted: bool) -> None:
        super().__init__(fn, programs)
        self.engine, self.parted, self.tape = engine, parted, fn.tape

    def again(self, batch: Any, remat: Remat) -> ProgramTrace | None:
        """The program for batches like this one; see ``Finder``."""
        programs = self.programs
        part = microbatches(batch, programs.accumulate, programs.plan.batch)[0]
        try:
            found = trace_in(ProgramMode(), self.fn, programs.plan, part, True, remat, Watched(self.engine))
        finally:
            self.tape.begin(0)
        return None if found is None else self._parted(found[0])

    def learn(self, batch: Any, found: ProgramTrace) -> None:
        """Keep what a run on demand has found; see ``Finder``."""
        super().learn(batch, self._parted(found))

    def _parted(self, found: ProgramTrace) -> ProgramTrace:
        return replace(found, program=replace(found.program, parted=self.parted and "taped"), foreign=False, scaled=())
