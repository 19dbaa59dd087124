"""The runner: finds the program of a function, prepares it once, and makes attempts at running it on all ranks."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard import tree
from fshard.errors import different_microbatches, foreign_params, left_in_backward, no_processes, weighted_in_backward
from fshard.runtime.attempt import FAILURE, Outcome, agree, guarded, request, uneven_rows
from fshard.runtime.batch import check_device, digest, microbatches, signature
from fshard.runtime.commit import FAILED, OK, RETRY, Tally, vote
from fshard.runtime.executor import OnDemand, Scheduled, program_of
from fshard.runtime.float16 import divisor_of
from fshard.runtime.loss import check_differentiable, detached, means_of, number, read_loss
from fshard.runtime.prepare import Prepared, Workshop
from fshard.runtime.trace import Found, GlueWatch, trace
from fshard.runtime.update import Shard, Update
from fshard.schedule.ops import ROOT, Op

Fn = Callable[..., Any]

PATIENCE = 3
"""Steps that may leave their schedule before a warning says so."""

MANY = 32
"""Signatures of batches that may be met before a warning says so."""


@dataclass(frozen=True)
class Work:
    """What one step is given.

    Attributes:
        batch: this rank's batch.
        shards: the parameters, by group id.
        update: the update that still waits for this step.
        check: raises what makes this rank refuse the step before it begins.
        randomness: makes the context in which an attempt draws its random numbers.
        parts: the microbatches.
        boost: what the loss is multiplied by for the backward.
    """

    batch: Any
    shards: list[Shard]
    update: Update | None = None
    check: Callable[[], object] = bool
    randomness: Callable[[], AbstractContextManager[None]] = nullcontext
    parts: Sequence[Any] = ()
    boost: float = 1.0


class Runner:
    """Runs one function of ``(params, batch)`` on the ranks of a plan.

    Args:
        fn: the loss function, or for evaluation any function.
        workshop: what it runs with; ``workshop.train`` says which of the two it is.
    """

    def __init__(self, fn: Fn, workshop: Workshop) -> None:
        self.fn, self.workshop, self.plan = fn, workshop, workshop.plan
        self.found: dict[Hashable, Found | None] = {}
        self.record: list[Op] = []
        self.latest: Prepared | None = None
        self.retries = 0
        self.parts = self.plan.data_size * workshop.accumulate
        self.in_backward = workshop.train and workshop.policy.update == "in_backward"
        self.divisor = divisor_of(self.plan, self.parts, self.in_backward)

    def look(self, batch: Any) -> Found | None:
        """The program for batches like this one; None if only a real run can tell."""
        key = signature(batch)
        if key not in self.found:
            self._count_programs()
            part = microbatches(batch, self.workshop.accumulate)[0]
            self.found[key] = trace(self.fn, self.plan, part, self.workshop.train)
        return self.found[key]

    def run(self, work: Work) -> Outcome:
        """Run the function on all ranks, again if its program was not the expected one.

        Returns:
            The outcome, with a verdict. A failure of this or of another rank is in it, not raised.

        Raises:
            BatchError, ScheduleError, PeerError, CommError: before or instead of a vote, on all ranks alike.
        """
        prepared, parts = self._prepare(work)
        work = replace(work, parts=parts)
        outcome = self._scheduled(prepared, work) if prepared else self._demanded(work)
        if outcome.verdict is not None and outcome.verdict.worst == RETRY:
            if self.in_backward and OK in outcome.verdict.status:
                raise left_in_backward()
            self._count_retry(outcome)
            outcome = self._demanded(work)
        return outcome

    def _demanded(self, work: Work) -> Outcome:
        prepared = self.workshop.on_demand()
        self.latest = None
        try:
            return self._on_demand(prepared, work)
        finally:
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

    def _prepare(self, work: Work) -> tuple[Prepared | None, list[Any]]:
        batch = work.batch
        if self.workshop.lanes is None:
            raise no_processes()
        try:
            work.check()
            check_device(batch, self.plan.mesh.device)
            parts = microbatches(batch, self.workshop.accumulate)
            found = self.look(batch)
            if found is None or not self.workshop.undecided(found):
                return (self.workshop.scheduled(found) if found else None), parts
        except BaseException as error:
            # Not raised before the other ranks, which wait in ``agree``, know of it.
            agree(self.workshop.lanes.control, 0, batch, False, error)
            raise
        # All ranks are here, with the same program, or none goes on.
        agree(self.workshop.lanes.control, digest(found.program.text), batch, False, None)
        self.workshop.decide(found)
        return self.workshop.scheduled(found), parts

    def _scheduled(self, prepared: Prepared, work: Work) -> Outcome:
        assert self.workshop.lanes is not None and prepared.schedule is not None
        lane, actions, outcome = self.workshop.lanes.control, prepared.actions, Outcome()
        equal_rows = self.workshop.train and not prepared.weighted
        actions.start(work.shards, work.update, self.in_backward)
        actions.on_agree = lambda: outcome.uneven.extend(agree(lane, prepared.digest, work.batch, equal_rows, None))
        actions.on_commit = lambda: self._vote(prepared, outcome)
        executor = Scheduled(prepared.schedule, prepared.positions, actions)
        self.latest, self.record = prepared, executor.record
        try:
            executor.agree()
            outcome.status = guarded(lambda: self._program(prepared, executor, work, outcome), outcome)
            if outcome.status != OK and self.in_backward:
                actions.update = None
                if outcome.status == RETRY and work.update is not None and work.update.begun:
                    outcome.status, outcome.failure = FAILED, left_in_backward()
            executor.finish()
            if not self.workshop.train:
                self._vote(prepared, outcome)
        finally:
            actions.stop()
        return outcome

    def _on_demand(self, prepared: Prepared, work: Work) -> Outcome:
        assert self.workshop.lanes is not None
        lane, outcome = self.workshop.lanes.control, Outcome()
        outcome.uneven = agree(lane, 0, work.batch, False, None)
        if work.update is not None and not self.in_backward:
            work.update.finish()
        prepared.actions.start(work.shards, None)
        prepared.actions.on_commit = lambda: self._vote(prepared, outcome)
        names = [group.name for group in self.plan.groups]
        reads = prepared.engine.reads
        executor = OnDemand(
            prepared.actions,
            names,
            lambda unit: list(reads[unit].groups),
            lambda text: request(lane, text),
            self.workshop.closing,
        )
        self.record = executor.record
        outcome.status = guarded(lambda: self._program(prepared, executor, work, outcome), outcome)
        if outcome.status == RETRY:
            # On demand everything of this step is readable.
            outcome.status, outcome.failure = FAILED, foreign_params()
        if outcome.status == FAILED and outcome.failure is not None:
            request(lane, f"{FAILURE}{type(outcome.failure).__name__}: {outcome.failure}")
            raise outcome.failure
        if outcome.uneven and self.workshop.train and not outcome.weighted:
            raise uneven_rows(outcome.uneven)
        executor.finish()
        program = program_of(executor, {name: list(read.groups) for name, read in reads.items()})
        self.found[signature(work.batch)] = Found(program, outcome.weighted, True, frozenset(prepared.engine.inner))
        return outcome

    def _program(self, prepared: Prepared, executor: Scheduled | OnDemand, work: Work, outcome: Outcome) -> None:
        engine = prepared.engine
        outcome.divided = self.divisor / work.boost
        try:
            # Autocast keeps casts of weights by the leaf's identity, and slot leaves outlive their values.
            torch.clear_autocast_cache()
            with work.randomness():
                for index, part in enumerate(work.parts):
                    executor.microbatch = index
                    engine.start(executor)
                    executor.reach("forward", ROOT, 0)
                    executor.settle()
                    self._pass(prepared, executor, part, outcome)
                    executor.end_microbatch()
        finally:
            engine.stop()

    def _pass(self, prepared: Prepared, executor: Scheduled | OnDemand, part: Any, outcome: Outcome) -> None:
        if self.workshop.train:
            self._microbatch(prepared, executor, part, outcome)
        else:
            with torch.no_grad():
                outcome.aux.append(self._call(prepared, executor, part))
            executor.reach("backward", ROOT, 0)

    def _call(self, prepared: Prepared, executor: Scheduled | OnDemand, part: Any) -> Any:
        engine, train = prepared.engine, self.workshop.train
        if isinstance(executor, Scheduled):
            return engine.run(self.fn, part, train)
        with GlueWatch(engine, executor):
            return engine.run(self.fn, part, train)

    def _microbatch(self, prepared: Prepared, executor: Scheduled | OnDemand, part: Any, outcome: Outcome) -> None:
        loss = read_loss(self._call(prepared, executor, part))
        check_differentiable(loss)
        if loss.count is not None and self.in_backward:
            raise weighted_in_backward()
        same = outcome.weighted is (loss.count is not None) and _spec(outcome.aux[:1]) == _spec([loss.aux])
        if outcome.aux and not same:
            raise different_microbatches()
        outcome.losses.append((loss.total.detach(), 1.0 if loss.count is None else loss.count))
        outcome.weighted = loss.count is not None
        outcome.aux.append(tree.map(detached, loss.aux))
        seed = torch.full_like(loss.total, 1.0 / outcome.divided)
        prepared.engine.differentiate(loss.total, seed)

    def _vote(self, prepared: Prepared, outcome: Outcome) -> None:
        assert self.workshop.lanes is not None
        tally = Tally(outcome.status)
        if self.workshop.train and outcome.status == OK:
            prepared.actions.settle_gradients()
            # The only reads of the device in a step: until here the host runs ahead of it.
            total, count = (sum(map(number, column)) for column in zip(*outcome.losses, strict=True))
            means = sum(map(len, map(means_of, outcome.aux)))
            tally = Tally(OK, prepared.actions.sumsq(), total, count, outcome.weighted, means)
        copies = self.plan.mesh.size // self.plan.data_size
        outcome.verdict = vote(self.workshop.lanes.control, tally, self.parts, copies, outcome.divided)


def _spec(values: Any) -> Any:
    return tree.flatten(values)[1]
