"""One step on all ranks, in five stages. Each is a function of what the stage before returned.

=============  =========================================================================================================
``prepare``    What this rank is about to run: its program with a schedule and memory, and the microbatches. A rank that
               cannot run anything says so in the handshake.
``handshake``  Ranks compare what they are about to run, before anything else is sent.
``run``        The program runs, and with it every op of the schedule before the consensus. A rank whose program fails
               still issues the collectives that its schedule holds, with whatever data it has: no rank hangs.
``consensus``  Ranks exchange their losses, norms and failures. All learn at one point whether the step happened.
``conclude``   The failure of any rank is raised on all of them. What is left is an outcome for whoever called:
               ``training.step`` makes the next state of it.
=============  =========================================================================================================

Where no schedule is known, because the program depends on values of tensors, or because it left its schedule, the same
stages run with an executor that gathers on demand.
"""

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from fshard.errors import CommError, LossError, PeerError, ScheduleError, foreign_params, left_in_backward
from fshard.runtime.comm import COLLECTIVES
from fshard.runtime.comm.facts import Facts, digest
from fshard.runtime.engine.batch import check_device, check_even, microbatches
from fshard.runtime.engine.loss import as_means
from fshard.runtime.execution import Found
from fshard.runtime.execution.executor import OnDemand, Scheduled, program_of
from fshard.runtime.steps.consensus import FAILED, OK, RETRY, RuleNorms, Tally, consensus, tally
from fshard.runtime.steps.failures import raise_failure, report, request, together
from fshard.runtime.steps.finder import Finder, Fn
from fshard.runtime.steps.float16 import divisor_of
from fshard.runtime.steps.handshake import Intent, agree
from fshard.runtime.steps.passes import Passes
from fshard.runtime.steps.programs import Prepared, Programs
from fshard.runtime.steps.records import Agreed, Latest, Outcome, Ran, Ready, Request
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
        parts: microbatches of the global batch, over ranks and accumulation.
        divisor: what gradients are divided by before they are summed.
    """

    def __init__(self, fn: Fn, programs: Programs, call: str = "train step") -> None:
        self.programs, self.plan, self.call = programs, programs.plan, call
        self.finder = Finder(fn, programs)
        self.latest = Latest()
        self.parts = self.plan.data_size * programs.accumulate
        self.in_backward = programs.train and programs.policy.update == "in_backward"
        self.divisor = divisor_of(self.plan, self.parts, self.in_backward)
        self.passes = Passes(fn, programs.train, self.in_backward, self.divisor)
        self._retries = 0

    def run(self, given: Request) -> Outcome:
        """Run the function on all ranks, again if its program was not the expected one.

        Raises:
            BatchError, ScheduleError, ReplicationError, PeerError, CommError: on all ranks alike.
            BaseException: whatever the function raises on this rank.
        """
        transport = self.programs.comms.transport
        try:
            ready = self._prepare(given)
            outcome = self._attempt(ready)
            if outcome.verdict.worst == RETRY:
                transport.abort(COLLECTIVES)
                outcome = self._attempt(self._prepare_again(ready, outcome))
            return self._conclude(outcome)
        except BaseException:
            # Collectives of the program may be half done, on any rank: all ranks begin with new communicators.
            transport.abort(COLLECTIVES)
            raise

    def _attempt(self, ready: Ready) -> Outcome:
        try:
            return self._consensus(self._run(self._handshake(ready)))
        finally:
            self._release(ready.prepared)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def _prepare(self, given: Request) -> Ready:
        programs, batch, facts = self.programs, given.batch, Facts()
        try:
            given.refuse()
            facts = given.facts() if self.plan.mesh.size > 1 else facts
            check_device(batch, self.plan.mesh.device)
            parts = microbatches(batch, programs.accumulate)
            found = self.finder.look(batch)
            if programs.train and found is not None and not found.weighted:
                check_even(batch, programs.accumulate)
        except BaseException as error:
            self._decline(batch, error)
        if found is not None and (auto := programs.undecided(found)) is not None:
            self._choose_policy(found, auto, batch, facts)
        return self._ready(given, found, parts, facts)

    def _ready(self, given: Request, found: Found | None, parts: Sequence[Any], facts: Facts) -> Ready:
        """The program with its memory, on demand if there is none, and the loop over its ops."""
        try:
            prepared = self.programs.scheduled(found) if found is not None else self.programs.on_demand()
            return Ready(given, prepared, self._executor(prepared, given), parts, facts)
        except BaseException as error:  # most likely, there is not enough memory
            self._decline(given.batch, error)

    def _executor(self, prepared: Prepared, given: Request) -> Scheduled | OnDemand:
        if prepared.route is not None:
            prepared.actions.start(given.shards, given.update, self.in_backward, given.accumulated)
            executor = Scheduled(prepared.route, prepared.actions, given.shield)
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

    def _choose_policy(self, found: Found, auto: Auto, batch: Any, facts: Facts) -> None:
        """Choose the policy of a new program. All ranks are here, with the same program, or none goes on."""
        comms = self.programs.comms
        intent = Intent(digest(found.program.text), lambda: found.program.text.replace(", ", ",\n"))
        agree(comms.control, self.call, intent, batch, False, None, facts)
        comms.open()
        self.programs.decide(found, auto)

    def _prepare_again(self, ready: Ready, outcome: Outcome) -> Ready:
        """What all ranks run after a program has left its schedule: the same, on demand."""
        update = ready.request.update
        if self.in_backward and OK in outcome.verdict.status:
            raise left_in_backward()
        if self.in_backward and update is not None:
            update.resume()
        self._count_retry(outcome)
        return self._ready(ready.request, None, ready.parts, ready.facts)

    def _decline(self, batch: Any, error: BaseException) -> NoReturn:
        """Tell the other ranks, which wait in the handshake, why this one does not take part, and raise it."""
        agree(self.programs.comms.control, self.call, Intent(), batch, False, error)
        raise error

    def _count_retry(self, outcome: Outcome) -> None:
        self._retries += 1
        if self._retries == PATIENCE:
            warnings.warn(
                f"{PATIENCE} steps left their schedule and ran again, gathered on demand: right, but slow, and with "
                f"the memory of all parameters. The last one: {outcome.left or 'on another rank'}. Let Python "
                f"values that decide which units run be part of the batch: then each has a schedule of its own",
                stacklevel=4,
            )

    # -- handshake ----------------------------------------------------------------------------------------------------

    def _handshake(self, ready: Ready) -> Agreed:
        prepared, given, comms = ready.prepared, ready.request, self.programs.comms
        intent = Intent(prepared.digest, prepared.text)
        equal_rows = self.programs.train and prepared.weighted is False
        with together(comms):
            uneven = ready.executor.handshake(
                lambda: agree(comms.control, self.call, intent, given.batch, equal_rows, None, ready.facts)
            )
            comms.open()
            for axes in prepared.axes:
                comms.transport.communicator(COLLECTIVES, axes)  # all ranks are here, and none can fail alone yet
        return Agreed(ready, uneven)

    # -- run ----------------------------------------------------------------------------------------------------------

    def _run(self, agreed: Agreed) -> Ran:
        with together(self.programs.comms):
            ran = self.passes.run(agreed)
            if ran.status != OK:
                # Ranks that wait for this one in a collective of the program learn at once that it will not come.
                self.programs.comms.transport.abort(COLLECTIVES, f"{ran.failure or ran.left}")
            return _drained(self._stopped(ran)) if isinstance(agreed.ready.executor, Scheduled) else self._reported(ran)

    def _stopped(self, ran: Ran) -> Ran:
        """Where a program that did not end updates in its backward, update nothing more."""
        update = ran.agreed.ready.request.update
        if ran.status == OK or not self.in_backward or update is None:
            return ran
        update.stop()
        if update.begun:
            return replace(ran, status=FAILED, failure=ran.failure or left_in_backward())
        return ran

    def _reported(self, ran: Ran) -> Ran:
        """Tell the other ranks that this one's program, on demand, has failed."""
        if ran.status == RETRY:
            # On demand everything of this step is readable.
            ran = replace(ran, status=FAILED, failure=foreign_params())
        if ran.failure is not None:
            report(self.programs.comms.control, ran.failure, ran.status)
        return ran

    # -- consensus ----------------------------------------------------------------------------------------------------

    def _consensus(self, ran: Ran) -> Outcome:
        agreed, executor = ran.agreed, ran.agreed.ready.executor
        if isinstance(executor, OnDemand) and ran.failure is not None:
            raise ran.failure  # the other ranks know
        with together(self.programs.comms):
            outcome = executor.consensus(lambda: self._decided(ran))
        if isinstance(executor, OnDemand):
            self._learn(agreed, executor, ran.weighted)
        return outcome

    def _decided(self, ran: Ran) -> Outcome:
        ran, mine = self._tally(ran) if ran.status == OK else (ran, Tally(ran.status))
        copies, divided = self.plan.mesh.size // self.plan.data_size, self.divisor / ran.agreed.ready.request.loss_scale
        rules = ran.agreed.ready.request.rules
        verdict = consensus(self.programs.comms.control, mine, self.parts, copies, divided, rules)
        return Outcome(verdict, ran.losses, ran.aux, ran.agreed.uneven, divided, ran.failure, ran.left)

    def _tally(self, ran: Ran) -> tuple[Ran, Tally]:
        given, gradients = ran.agreed.ready.request, ran.agreed.ready.prepared.actions.gradients
        try:
            if not self.programs.train:  # all ranks average as many numbers, or none does
                return ran, tally((), (), (), [as_means(result) for result in ran.aux], False, False)
            gradients.complete()
            rule_norms: Sequence[RuleNorms] = ()
            if given.rules:
                gradients.arrive()
                rule_norms = given.rule_norms()
            norms = [(gradients.shares[group], norm) for group, norm in gradients.all_norms().items()]
            return ran, tally(norms, rule_norms, ran.losses, ran.aux, ran.weighted, given.stop)
        except Exception as error:  # a device reports late what went wrong there
            return replace(ran, status=FAILED, failure=error), Tally(FAILED)

    def _learn(self, agreed: Agreed, executor: OnDemand, weighted: bool) -> None:
        """Write down the program that a run on demand has found, for a schedule."""
        engine = agreed.ready.prepared.engine
        program = program_of(executor, {name: list(read.groups) for name, read in engine.units.reads.items()})
        found = Found(program, weighted, True, frozenset(engine.inner), exact=engine.exact)
        self.finder.learn(agreed.ready.request.batch, found)

    def _release(self, prepared: Prepared) -> None:
        """Let go of what the attempt was given, and of all that is made for it alone."""
        prepared.actions.stop()
        if prepared.route is None:
            if self.programs.cache is not None:
                self.programs.cache.meet(prepared.engine.units.reads)
            # Slots and engine refer to each other, so their arena would wait for the garbage collector.
            prepared.engine.slots.release()

    # -- conclude -----------------------------------------------------------------------------------------------------

    def _conclude(self, outcome: Outcome) -> Outcome:
        verdict = outcome.verdict
        if verdict.worst == FAILED:
            own = verdict.status[self.plan.mesh.rank]
            raise_failure(self.programs.comms.control, outcome.failure, verdict.status, own)
        return outcome


def _drained(ran: Ran) -> Ran:
    """Run what is left of a schedule: for the update, or, after a failure, for the other ranks alone.

    Raises:
        CommError: a collective failed; or an op of this rank, twice, so that the others cannot go on.
    """
    executor = ran.agreed.ready.executor
    assert isinstance(executor, Scheduled)
    try:
        executor.finish()
    except (CommError, PeerError, ScheduleError, LossError):
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        if ran.status == OK:
            ran = replace(ran, status=FAILED, failure=error)
    executor.drain()
    return ran
