"""The runner: finds the program of a function, prepares it once, and makes attempts at running it on all ranks."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import tree
from fshard.arguments import raised
from fshard.errors import different_microbatches, foreign_params, left_in_backward, no_processes, weighted_in_backward
from fshard.runtime.comm import COLLECTIVES, Communicator
from fshard.runtime.comm.facts import Facts, digest
from fshard.runtime.engine.batch import check_device, check_even, microbatches, signature
from fshard.runtime.engine.loss import as_means, check_differentiable, detached, fingerprint, number, read_loss
from fshard.runtime.execution.executor import OnDemand, Scheduled, program_of
from fshard.runtime.execution.signals import Shield
from fshard.runtime.execution.trace import Found, GlueWatch, trace
from fshard.runtime.execution.update import Shard, Update
from fshard.runtime.steps.attempt import (
    BEHIND,
    FAILURE,
    Intent,
    Outcome,
    agree,
    drained,
    guarded,
    request,
    together,
    uneven_rows,
)
from fshard.runtime.steps.commit import CUT, FAILED, OK, RETRY, Tally, vote
from fshard.runtime.steps.float16 import divisor_of
from fshard.runtime.steps.prepare import Prepared, Workshop
from fshard.schedule.ops import ROOT, Op

Fn = Callable[..., Any]

PATIENCE = 3
"""Steps that may leave their schedule before a warning says so."""

MANY = 32
"""Signatures of batches that may be met before a warning says so."""


class Work(NamedTuple):
    """What one step is given.

    Attributes:
        batch: this rank's batch.
        shards: the parameters, by group id.
        shield: holds signals back while ranks communicate.
        update: the update that still waits for this step.
        check: raises what makes this rank refuse the step before it begins.
        facts: gives what must be equal on all ranks; called after ``check``.
        randomness: makes the context in which an attempt draws its random numbers.
        parts: the microbatches.
        boost: what the loss is multiplied by for the backward.
        stop: whether this rank asks all ranks to stop after this step.
    """

    batch: Any
    shards: list[Shard]
    shield: Shield
    update: Update | None = None
    check: Callable[[], object] = bool
    facts: Callable[[], Facts] = Facts
    randomness: Callable[[], AbstractContextManager[None]] = nullcontext
    parts: Sequence[Any] = ()
    boost: float = 1.0
    stop: bool = False


class Runner:
    """Runs one function of ``(params, batch)`` on the ranks of a plan.

    Args:
        fn: the loss function, or for evaluation any function.
        workshop: what it runs with; ``workshop.train`` says which of the two it is.
    """

    def __init__(self, fn: Fn, workshop: Workshop) -> None:
        self.fn, self.workshop, self.plan = fn, workshop, workshop.plan
        self.call = "train step" if workshop.train else "evaluation step"
        self.found: dict[Hashable, Found | None] = {}
        self.seen: Found | None = None
        self.record: list[Op] = []
        self.times: list[float] = []
        self.latest: Prepared | None = None
        self.retries = 0
        self.parts = self.plan.data_size * workshop.accumulate
        self.copies = self.plan.mesh.size // self.plan.data_size
        self.in_backward = workshop.train and workshop.policy.update == "in_backward"
        self.divisor = divisor_of(self.plan, self.parts, self.in_backward)

    def look(self, batch: Any) -> Found | None:
        """The program for batches like this one; None if only a real run can tell."""
        key = signature(batch)
        if key not in self.found:
            self._count_programs()
            part = microbatches(batch, self.workshop.accumulate)[0]
            found = self.found[key] = trace(self.fn, self.plan, part, self.workshop.train)
            if found is not None:
                self.workshop.remat.check({*found.program.reads, *(group.unit for group in self.plan.groups)})
        self.seen = self.found[key]
        return self.seen

    def run(self, work: Work) -> Outcome:
        """Run the function on all ranks, again if its program was not the expected one.

        Returns:
            The outcome, with a verdict. A failure of this or of another rank is in it, not raised.

        Raises:
            BatchError, ScheduleError, ReplicationError, PeerError, CommError: before or instead of a vote, on all
                ranks alike.
        """
        if self.workshop.comms is None:
            raise no_processes()
        transport = self.workshop.comms.transport
        try:
            outcome = self._attempts(work)
        except BaseException:
            # Collectives of the program may be half done, on any rank: all ranks begin with new communicators.
            transport.abort(COLLECTIVES)
            raise
        assert outcome.verdict is not None
        if outcome.verdict.worst == FAILED:
            transport.abort(COLLECTIVES)
        return outcome

    def _attempts(self, work: Work) -> Outcome:
        assert self.workshop.comms is not None
        prepared, parts, facts = self._prepare(work)
        work = work._replace(parts=parts, facts=lambda: facts)
        outcome = self._scheduled(prepared, work) if prepared else self._demanded(work)
        if outcome.verdict is not None and outcome.verdict.worst == RETRY:
            if self.in_backward and OK in outcome.verdict.status:
                raise left_in_backward()
            if self.in_backward and work.update is not None:
                work.update.resume()
            self._count_retry(outcome)
            self.workshop.comms.transport.abort(COLLECTIVES)
            outcome = self._demanded(work)
        return outcome

    def _demanded(self, work: Work) -> Outcome:
        assert self.workshop.comms is not None
        try:
            prepared = self.workshop.on_demand()
        except Exception as error:  # the memory of all parameters is not there
            agree(self.workshop.comms.control, self.call, Intent(), work.batch, False, error)
            raise
        self.latest = None
        try:
            return self._on_demand(prepared, work)
        finally:
            if self.workshop.cache is not None:
                self.workshop.cache.meet(prepared.engine.units.reads)
            # Slots and engine refer to each other, so their arena would wait for the garbage collector.
            prepared.engine.slots.release()
            prepared.actions.stop()

    def _count_programs(self) -> None:
        if len(self.found) == MANY:
            warnings.warn(
                f"{MANY} batches differed in values that are no tensors, and each was traced anew: pass values that "
                f"change from step to step as tensors",
                stacklevel=5,
            )
        if len(self.found) > 4 * MANY:
            self.found.clear()

    def _count_retry(self, outcome: Outcome) -> None:
        self.retries += 1
        if self.retries == PATIENCE:
            warnings.warn(
                f"{PATIENCE} steps left their schedule and ran again, gathered on demand: right, but slow, and with "
                f"the memory of all parameters. The last one: {outcome.left or 'on another rank'}. Let Python "
                f"values that decide which units run be part of the batch: then each has a schedule of its own",
                stacklevel=4,
            )

    def _prepare(self, work: Work) -> tuple[Prepared | None, list[Any], Facts]:
        batch = work.batch
        assert self.workshop.comms is not None
        try:
            work.check()
            facts = work.facts() if self.plan.mesh.size > 1 else Facts()
            check_device(batch, self.plan.mesh.device)
            parts = microbatches(batch, self.workshop.accumulate)
            found = self.look(batch)
            if self.workshop.train and found is not None and not found.weighted:
                check_even(batch, self.workshop.accumulate)
            if found is None or not self.workshop.undecided(found):
                return (self.workshop.scheduled(found) if found else None), parts, facts
        except BaseException as error:
            # Not raised before the other ranks, which wait in ``agree``, know of it.
            agree(self.workshop.comms.control, self.call, Intent(), batch, False, error)
            raise
        # All ranks are here, with the same program, or none goes on.
        intent = Intent(digest(found.program.text), lambda: found.program.text.replace(", ", ",\n"))
        agree(self.workshop.comms.control, self.call, intent, batch, False, None, facts)
        self.workshop.comms.open()
        self.workshop.decide(found)
        return self.workshop.scheduled(found), parts, facts

    def _scheduled(self, prepared: Prepared, work: Work) -> Outcome:
        assert self.workshop.comms is not None and prepared.route is not None
        comms, actions, outcome = self.workshop.comms, prepared.actions, Outcome()
        equal_rows = self.workshop.train and not prepared.weighted
        actions.start(work.shards, work.update, self.in_backward)
        intent = Intent(prepared.digest, prepared.text)

        def handshake() -> None:
            rows = agree(comms.control, self.call, intent, work.batch, equal_rows, None, work.facts())
            outcome.uneven.extend(rows)

        consensus = partial(self._vote, prepared, work, outcome)
        executor = Scheduled(prepared.route, actions, handshake, consensus, work.shield)
        self.latest, self.record, self.times = prepared, executor.record, executor.times
        with together(comms):
            try:
                executor.handshake()
                comms.open()
                for axes in prepared.comms:
                    comms.transport.communicator(COLLECTIVES, axes)  # all ranks are here, and none can fail alone yet
                self._guarded(prepared, executor, work, outcome)
                if outcome.status != OK and self.in_backward:
                    if actions.update is not None:
                        actions.update.stop()
                    if outcome.status == RETRY and work.update is not None and work.update.begun:
                        outcome.status, outcome.failure = FAILED, left_in_backward()
                drained(outcome, executor)
                if not self.workshop.train:
                    self._vote(prepared, work, outcome)
            finally:
                actions.stop()
        return outcome

    def _guarded(self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, outcome: Outcome) -> None:
        assert self.workshop.comms is not None
        outcome.status = guarded(lambda: self._program(prepared, executor, work, outcome), outcome, executor)
        if outcome.status != OK:
            # Ranks that wait for this one in a collective of the program learn at once that it will not come.
            self.workshop.comms.transport.abort(COLLECTIVES, f"{outcome.failure or outcome.left}")

    def _on_demand(self, prepared: Prepared, work: Work) -> Outcome:
        assert self.workshop.comms is not None
        comms, outcome = self.workshop.comms, Outcome()
        names = [group.name for group in self.plan.groups]
        reads = prepared.engine.units.reads
        executor = OnDemand(
            prepared.actions,
            names,
            lambda unit: list(reads[unit].groups),
            lambda text: request(comms.control, text),
            self.workshop.closing,
            partial(self._vote, prepared, work, outcome),
            work.shield,
        )
        self.record, self.times = executor.record, []
        with together(comms):
            outcome.uneven = agree(comms.control, self.call, Intent(), work.batch, False, None, work.facts())
            comms.open()
            self._guarded(prepared, executor, work, outcome)
            self._left(comms.control, outcome)
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.uneven and self.workshop.train and not outcome.weighted:
            raise uneven_rows(outcome.uneven)
        if self.workshop.train and not outcome.weighted:
            check_even(work.batch, self.workshop.accumulate)  # all ranks have as many rows: they raise it alike
        with together(comms):
            executor.finish()
        program = program_of(executor, {name: list(read.groups) for name, read in reads.items()})
        self.found[signature(work.batch)] = Found(
            program, outcome.weighted, True, frozenset(prepared.engine.inner), exact=prepared.engine.exact
        )
        return outcome

    def _left(self, comm: Communicator, outcome: Outcome) -> None:
        """Tell the other ranks that this one's program, on demand, has failed."""
        if outcome.status == RETRY:
            # On demand everything of this step is readable.
            outcome.status, outcome.failure = FAILED, foreign_params()
        if outcome.failure is not None:
            mark = BEHIND if outcome.status == CUT else FAILURE
            request(comm, mark + raised(outcome.failure))

    def _begin(self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, outcome: Outcome) -> None:
        if isinstance(executor, OnDemand):
            if work.update is not None and not self.in_backward:
                work.update.finish()
            prepared.actions.start(work.shards, None)

    def _program(self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, outcome: Outcome) -> None:
        engine = prepared.engine
        outcome.divided = self.divisor / work.boost
        self._begin(prepared, executor, work, outcome)
        try:
            # Autocast keeps casts of weights by the leaf's identity, and slot leaves outlive their values.
            torch.clear_autocast_cache()
            with work.randomness():
                for index, part in enumerate(work.parts):
                    executor.microbatch = index
                    engine.start(executor)
                    executor.reach("forward", ROOT, 0)
                    executor.settle()
                    self._pass(prepared, executor, work, part, outcome)
                    executor.end_microbatch()
        finally:
            engine.stop()

    def _pass(
        self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, part: Any, outcome: Outcome
    ) -> None:
        if self.workshop.train:
            self._microbatch(prepared, executor, work, part, outcome)
        else:
            with torch.no_grad():
                outcome.aux.append(self._call(prepared, executor, work, part))
            executor.reach("backward", ROOT, 0)

    def _call(self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, part: Any) -> Any:
        engine = prepared.engine
        watch = nullcontext() if isinstance(executor, Scheduled) else GlueWatch(engine, executor)
        with watch, work.shield.opened():
            return engine.run(self.fn, part, self.workshop.train)

    def _microbatch(
        self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, part: Any, outcome: Outcome
    ) -> None:
        loss = read_loss(self._call(prepared, executor, work, part))
        check_differentiable(loss)
        if loss.count is not None and self.in_backward:
            raise weighted_in_backward()
        weighted = loss.count is not None
        if outcome.aux and (outcome.weighted is not weighted or _spec(outcome.aux[:1]) != _spec([loss.aux])):
            raise different_microbatches()
        outcome.losses.append((loss.total.detach(), 1.0 if loss.count is None else loss.count))
        outcome.weighted = weighted
        outcome.aux.append(tree.map(detached, loss.aux) if loss.aux else loss.aux)
        seed = torch.full_like(loss.total, 1.0 / outcome.divided)
        with work.shield.opened():
            prepared.engine.differentiate(loss.total, seed)

    def _vote(self, prepared: Prepared, work: Work, outcome: Outcome) -> None:
        assert self.workshop.comms is not None
        tally = Tally(outcome.status)
        if outcome.status == OK:
            try:
                tally = self._tally(prepared, work, outcome)
            except Exception as error:  # a device reports late what went wrong there
                outcome.status, outcome.failure, tally = FAILED, error, Tally(FAILED)
        outcome.verdict = vote(self.workshop.comms.control, tally, self.parts, self.copies, outcome.divided)

    def _tally(self, prepared: Prepared, work: Work, outcome: Outcome) -> Tally:
        if not self.workshop.train:  # all ranks average as many numbers, or none does
            return Tally(OK, means=fingerprint(as_means(outcome.aux)))
        gradients = prepared.actions.gradients
        gradients.settle()
        # The only reads of the device in a step: until here the host runs ahead of it.
        total, count = (sum(map(number, column)) for column in zip(*outcome.losses, strict=True))
        return Tally(OK, gradients.sumsq(), total, count, outcome.weighted, fingerprint(outcome.aux), work.stop)


def _spec(values: Any) -> Any:
    return tree.flatten(values)[1]
