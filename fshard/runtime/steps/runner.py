"""Steps of a loss function, or of any function of a batch: what they prepare, and what their passes come to.

``protocol`` has the five stages. Where no schedule is known, because the program depends on values of tensors, or
because it left its schedule, the same stages run with an executor that gathers on demand.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fshard.runtime.comm import COLLECTIVES, exchange, refuse_nested
from fshard.runtime.comm.facts import Facts, digest
from fshard.runtime.engine.batch import check_detached, check_device, check_even, microbatches
from fshard.runtime.engine.proxies import foreign_params
from fshard.runtime.engine.remat_rules import differentiated
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.execution.observers import observers_of
from fshard.runtime.execution.route import Observer
from fshard.runtime.execution.trace_program import GlueWatch
from fshard.runtime.execution.tracing import program_of
from fshard.runtime.steps.batch_rows import rows_of, uneven_rows
from fshard.runtime.steps.consensus import (
    FAILED,
    OK,
    RETRY,
    STARVED,
    Columns,
    Tally,
    status_alone,
    tally,
    tally_columns,
    verdict_of,
)
from fshard.runtime.steps.failures import left_in_backward, report, request, starved, together
from fshard.runtime.steps.finder import Finder, Fn
from fshard.runtime.steps.float16 import divisor_of
from fshard.runtime.steps.handshake import Intent, Terms, agree
from fshard.runtime.steps.passes import Passes
from fshard.runtime.steps.programs import Prepared, Programs
from fshard.runtime.steps.protocol import Meetings
from fshard.runtime.steps.rank_end import End, decline, drained
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.records import Agreed, Latest, Outcome, PassResult, ProgramRun, Ready, StepRequest
from fshard.schedule.auto import Auto

PATIENCE = 3
"""Steps that may leave their schedule before a warning says so."""


class Runner:
    """Runs one function of ``(params, batch)`` on the ranks of a plan.

    Args:
        fn: the loss function, or for evaluation any function.
        programs: the programs; ``programs.train`` says which of the two it is.
        call: what ranks call it when they compare their calls.

    Attributes:
        finder: finds the program of a batch.
        latest: the latest run.
        rows: which sizes of batches must be equal on all ranks.
        parts: microbatches of the global batch, over ranks and accumulation.
        divisor: what gradients are divided by before they are summed.
    """

    def __init__(self, fn: Fn, programs: Programs, call: str = "train step") -> None:
        self.programs, self.plan, self.call = programs, programs.plan, call
        self.finder = Finder(fn, programs)
        self.latest = Latest()
        self.rows = rows_of(self.plan.whole or self.plan)
        self.parts = self.plan.data_size * programs.accumulate
        self.in_backward = programs.train and programs.policy.update == "in_backward"
        self.divisor = divisor_of(self.plan, self.parts, self.in_backward)
        self.passes = Passes(fn, programs.train, self.in_backward, self.divisor)
        self._meetings = Meetings(self.plan.mesh.together)
        self._retries = 0
        self._told = False

    def run(self, given: StepRequest) -> Outcome:
        """Run the function on all ranks, again if its program was not the expected one.

        Raises:
            BatchError, ScheduleError, ReplicationError, PeerError, CommError: on all ranks alike.
            LossError: the call is made inside of a function that another step runs.
            BaseException: whatever the function raises on this rank.
        """
        refuse_nested(self.call)
        transport = self.programs.comms.transport
        try:
            ready = self._prepare(given)
            outcome = self._attempt(ready)
            while outcome.verdict.worst == STARVED:
                transport.abort(COLLECTIVES)
                ready = self._prepare_without(ready)
                outcome = self._attempt(ready)
            if outcome.verdict.worst == RETRY:
                transport.abort(COLLECTIVES)
                outcome = self._attempt(self._prepare_again(ready, outcome))
            return self._conclude(outcome)
        except BaseException:
            # Collectives of the program may be half done, on any rank: all ranks begin with new communicators.
            transport.abort(COLLECTIVES)
            raise

    def flops(self, batch: Any) -> int | None:
        """Floating-point operations of the model in a run on this batch, on this rank; see ``Finder.flops``."""
        return self.finder.flops(batch)

    @contextmanager
    def observed(self, batch: Any, observer: Observer) -> Iterator[Prepared]:
        """The program of a batch, of whose ops an observer is told while this lasts."""
        found, programs = self.finder.look(batch), self.programs
        assert found is not None
        prepared = programs.scheduled(found)
        key = next(key for key, made in programs.made.items() if made is prepared)
        assert prepared.route is not None
        programs.made[key] = replace(prepared, route=replace(prepared.route, observers=(observer,)))
        try:
            yield prepared
        finally:
            programs.made[key] = prepared

    def _attempt(self, ready: Ready) -> Outcome:
        try:
            return self._consensus(self._run(self._handshake(ready)))
        finally:
            self._release(ready.prepared)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def _prepare(self, given: StepRequest) -> Ready:
        programs, batch, facts = self.programs, given.batch, Facts()
        try:
            given.refuse()
            facts = given.facts() if self.plan.mesh.together.size > 1 else facts
            check_device(batch, self.plan.mesh.device)
            if programs.train:
                check_detached(batch)
            parts = self.cut_batch(batch)
            found = self._look(batch)
            if programs.train and found is not None and not found.weighted:
                check_even(batch, programs.accumulate)
        except BaseException as error:
            decline(programs.comms.control, self.call, batch, error)
        if found is not None and (auto := programs.undecided(found)) is not None:
            found = self._choose_policy(found, auto, batch, facts)
        return self._ready(given, found, parts, facts)

    def _ready(self, given: StepRequest, found: ProgramTrace | None, parts: Sequence[Any], facts: Facts) -> Ready:
        """The program with its memory, on demand if there is none, and the loop over its ops."""
        try:
            prepared = self.programs.scheduled(found) if found is not None else self.programs.on_demand()
            return Ready(given, prepared, self._executor(prepared, given), parts, facts)
        except BaseException as error:  # most likely, there is not enough memory
            decline(self.programs.comms.control, self.call, given.batch, error)

    def _executor(self, prepared: Prepared, given: StepRequest) -> Scheduled | OnDemand:
        if prepared.route is not None:
            prepared.actions.start(given.shards, given.update, self.in_backward, given.accumulated, given.feedback)
            executor = Scheduled(prepared.route, prepared.actions, given.shield, observers_of(self.plan.mesh))
            self.latest = Latest(prepared.route.schedule, executor.record, executor.times, prepared)
            return executor
        control, reads = self.programs.comms.control, prepared.engine.units.reads
        on_demand = OnDemand(
            prepared.actions,
            [group.name for group in self.plan.groups],
            lambda unit: list(reads[unit].groups),
            lambda text: request(control, text),
            self.programs.closing,
            given.shield,
        )
        self.latest = Latest(record=on_demand.record)
        return on_demand

    def _choose_policy(self, found: ProgramTrace, auto: Auto, batch: Any, facts: Facts) -> ProgramTrace:
        """Choose the policy of a new program. All ranks are here, with the same program, or none goes on.

        Returns:
            The program, with the units that are computed again then.
        """
        comms = self.programs.comms
        intent = Intent(digest(found.program.text), lambda: found.program.text.replace(", ", ",\n"))
        agree(comms.control, Terms(self.call, intent, batch, facts))
        comms.open()
        self._decide(found, auto, batch)
        return self._look(batch) or found

    def cut_batch(self, batch: Any) -> list[Any]:
        """The microbatches."""
        return microbatches(batch, self.programs.accumulate, self.plan.batch)

    def _look(self, batch: Any) -> ProgramTrace | None:
        """The program of a batch; None if no trace finds it."""
        return self.finder.look(batch)

    def _decide(self, found: ProgramTrace, auto: Auto, batch: Any) -> None:
        """Choose the policy of a program, or hold the next round of its contest. Collective."""
        self.programs.decide(found, lambda: self.programs.foreseen(found, auto, partial(self.finder.again, batch)))

    def _prepare_again(self, ready: Ready, outcome: Outcome) -> Ready:
        """Return what all ranks run after a program has left its schedule: the same, on demand."""
        update = ready.request.update
        if self.in_backward and OK in outcome.verdict.status:
            raise left_in_backward()
        if self.in_backward and update is not None:
            update.resume()
        self._retries += 1
        if self._retries == PATIENCE:
            warnings.warn(
                f"{PATIENCE} steps left their schedule and ran again, gathered on demand: right, but slow, and with "
                f"the memory of all parameters. The last one: {outcome.end.left or 'on another rank'}. Let Python "
                f"values that decide which units run be part of the batch: then each has a schedule of its own",
                stacklevel=3,
            )
        return self._ready(ready.request, None, ready.parts, ready.facts)

    def _prepare_without(self, ready: Ready) -> Ready:
        """Return what all ranks run after one had too little memory for a policy that is being timed: the next one."""
        contest, batch = ready.prepared.contest, ready.request.batch
        assert contest is not None
        contest.fail()
        found = self._look(batch)
        assert found is not None and isinstance(self.programs.policy, Auto)
        self._decide(found, self.programs.policy, batch)
        return self._ready(ready.request, found, ready.parts, ready.facts)

    # -- handshake ----------------------------------------------------------------------------------------------------

    def _handshake(self, ready: Ready, mode: int = 0) -> Agreed:
        prepared, call, batch = ready.prepared, self.call, ready.request.batch
        equal_rows = self.programs.train and prepared.weighted is False
        rows = self.rows.of(self.programs.train and prepared.route is not None, prepared.axes)
        terms = Terms(call, Intent(prepared.digest, prepared.text), batch, ready.facts, rows, equal_rows, mode)
        return Agreed(ready, *self._meetings.handshake(ready.executor, terms, [self.programs.comms], prepared.axes))

    # -- run ----------------------------------------------------------------------------------------------------------

    def _run(self, agreed: Agreed) -> ProgramRun:
        executor = agreed.ready.executor
        with together(self._meetings.transport):
            measured, end = self._meetings.run(executor, lambda: self._program(agreed))
            if isinstance(executor, Scheduled):
                end = self._excused(agreed, drained(executor, self._stopped(agreed, end)))
            else:
                end = self._reported(end)
            return ProgramRun(agreed, measured or PassResult(), end)

    def _program(self, agreed: Agreed) -> PassResult:
        """Run the program of this rank."""
        executor, given, prepared = agreed.ready.executor, agreed.ready.request, agreed.ready.prepared
        if isinstance(executor, OnDemand):
            if given.update is not None and not self.in_backward:
                given.update.finish()
                executor.ask("the update")  # others would wait for the parts of a rank whose update has failed
                prepared.actions.complete(given.update)
            prepared.actions.start(given.shards, None, False, given.accumulated, given.feedback)
        watch, opened = partial[Any](nullcontext), given.shield.opened
        if isinstance(executor, OnDemand):
            watch = partial(GlueWatch, prepared.engine, executor, self.programs.train)
        scale, parts = given.loss_scale if given.seed is None else given.seed, agreed.ready.parts
        with given.randomness():
            measured = self.passes.run(prepared.engine, executor, parts, scale, opened, watch)
        if isinstance(executor, OnDemand):
            self._check_rows(agreed, measured)
            executor.ask("the end of the program")  # a rank that failed after its last request answers here
        return measured

    def _check_rows(self, agreed: Agreed, measured: PassResult) -> None:
        """Refuse a plain mean over unequal rows: on demand, only the run shows that the loss is one."""
        if self.programs.train and not measured.weighted:
            if agreed.uneven:
                raise uneven_rows(agreed.uneven)
            check_even(agreed.ready.request.batch, len(agreed.ready.parts))

    def _stopped(self, agreed: Agreed, end: End) -> End:
        """Update nothing more, where a program that did not end updates in its backward."""
        update = agreed.ready.request.update
        if end.status == OK or not self.in_backward or update is None:
            return end
        update.stop()
        return End(FAILED, end.failure or left_in_backward()) if update.begun else end

    def _excused(self, agreed: Agreed, end: End) -> End:
        """Ask for another policy, where there was too little memory for one that the step could do without."""
        contest, failure = agreed.ready.prepared.contest, end.failure
        if self.in_backward or contest is None or not contest.dispensable:
            return end
        return End(STARVED, failure) if failure is not None and starved(failure) else end

    def _reported(self, end: End) -> End:
        """Tell the other ranks that this one's program, on demand, has failed."""
        if end.status == RETRY:
            # On demand everything of this step is readable.
            end = End(FAILED, foreign_params())
        if end.failure is not None:
            report(self.programs.comms.control, end.failure, end.status)
        return end

    # -- consensus ----------------------------------------------------------------------------------------------------

    def _consensus(self, ran: ProgramRun) -> Outcome:
        agreed, executor = ran.agreed, ran.agreed.ready.executor
        if isinstance(executor, OnDemand) and ran.end.failure is not None:
            raise ran.end.failure  # the other ranks know
        with together(self._meetings.transport):
            outcome = executor.consensus(lambda: self._decided(ran))
        if isinstance(executor, OnDemand):
            self._learn(agreed, executor, ran.measured.weighted)
        return outcome

    def _decided(self, ran: ProgramRun) -> Outcome:
        given, comms = ran.agreed.ready.request, self.programs.comms
        copies, divided = self.plan.mesh.size // self.plan.data_size, self.divisor / given.loss_scale

        def columns(tally: Tally | None, busy: float) -> Columns:
            return tally_columns(tally or Tally(), given.rules, (busy, tally.mean if tally else 0.0))

        met = self._meetings.consensus(ran.agreed.ready.executor, ran.end, lambda: self._tally(ran), columns)
        if not met.whole:
            return Outcome(status_alone(met.row.status), ran.measured, met.end, 1.0)
        verdict = verdict_of(comms.control, met.row, met.mine or Tally(), self.parts, copies, divided)
        if verdict.unlike and ran.agreed.uneven and verdict.worst == OK:
            raise uneven_rows(ran.agreed.uneven, verdict.unlike)
        return Outcome(verdict, ran.measured, met.end, divided)

    def _tally(self, ran: ProgramRun) -> Tally:
        """Read what this rank's program came to."""
        if not self.programs.train:  # all ranks average as many numbers, or none does
            return tally((), (), (), ran.measured.aux, False, False)
        losses, aux, weighted, _ = ran.measured
        return tally(*self._norms(ran.agreed.ready), losses, aux, weighted, ran.agreed.ready.request.stop)

    def _norms(self, ready: Ready) -> tuple[RuleNorms, Sequence[RuleNorms]]:
        """The norms of complete gradients: of each group, and of the leaves of each rule that asks for one."""
        given, gradients = ready.request, ready.prepared.actions.gradients
        gradients.complete()
        taken = gradients.all_norms() if given.normed else {}
        norms = {group: (gradients.shares[group], norm) for group, norm in taken.items()}
        if given.rules:
            gradients.arrive()
        return [*norms.values()], given.rule_norms(norms) if given.rules else ()

    def _learn(self, agreed: Agreed, executor: OnDemand, weighted: bool) -> None:
        """Write down the program that a run on demand has found, for a schedule."""
        engine = agreed.ready.prepared.engine
        program = program_of(executor, {name: list(read.groups) for name, read in engine.units.reads.items()})
        hosted = self.programs.remat.hosted(program) if self.programs.train else {}
        if taken := sorted(engine.inner.intersection(hosted)):
            raise differentiated(taken)
        program, inner = replace(program, hosted=hosted), frozenset(engine.inner)
        found = ProgramTrace(program, weighted, True, inner, exact=engine.exact, remat=self.programs.remat)
        found = replace(found, scaled=tuple(executor.scaled))
        if self.programs.train or self._common(found):
            self.finder.learn(agreed.ready.request.batch, found)

    def _common(self, found: ProgramTrace) -> bool:
        """Tell whether all ranks have found the same program; evaluations may end at different calls. Collective."""
        if (control := self.programs.comms.control).size == 1:
            return True
        numbers = exchange(control, torch.tensor([digest(found.program.text)], device="cpu"))
        common = len(set(numbers.flatten().tolist())) == 1
        if not common and not self._told:
            self._told = True
            warnings.warn(
                "ranks called other units, or in another order, in an evaluation that depends on values: right, but "
                "such an evaluation has no schedule, and gathers on demand, with the memory of all parameters",
                stacklevel=7,
            )
        return common

    def _release(self, prepared: Prepared) -> None:
        """Let go of what the attempt was given, and of all that is made for it alone."""
        prepared.actions.stop()
        if prepared.route is None:
            if self.programs.cache is not None:
                self.programs.cache.meet(prepared.engine.units.reads)
            # Slots and engine refer to each other, so their arena would wait for the garbage collector.
            prepared.engine.release()

    # -- conclude -----------------------------------------------------------------------------------------------------

    def _conclude(self, outcome: Outcome) -> Outcome:
        verdict, latest = outcome.verdict, self.latest
        contest = latest.prepared.contest if latest.prepared is not None else None
        if verdict.worst == FAILED:
            if contest is not None:
                contest.fail()
            self._meetings.raise_failure(outcome.end, verdict.status)
        if contest is not None:
            contest.note(latest.times)
        return outcome
