"""The five stages of a step function on all ranks: those of ``runtime.steps.protocol``, around a function of parts.

``prepare`` finds what the function does, and its schedule. ``handshake`` compares it on all ranks. ``run`` runs the
function, whose parts come to the ops of the schedule in their order. ``consensus`` is one exchange of all losses, norms
and failures. ``conclude`` makes the next states of it.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from fshard import tree
from fshard.collectives.scope import bind
from fshard.errors import TreeError
from fshard.parts.assemble import assemble, scheduled, task_of
from fshard.parts.leaf_ages import after_call, trained_leaves
from fshard.parts.numbers import Numbers, StepTally
from fshard.parts.record import StepRecord, Untraced, record
from fshard.parts.replay import Replay
from fshard.parts.returned_values import joint_floats, returned_values, with_floats
from fshard.parts.step_arguments import Arguments, Final, FunctionResult, check_mesh
from fshard.parts.step_values import Updated
from fshard.runtime.comm import COLLECTIVES, Facts, digest, refuse_nested
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.engine.batch import check_detached, signature
from fshard.runtime.engine.loss_result import check_data, left_by_trace
from fshard.runtime.engine.rng import seeded
from fshard.runtime.execution import PendingUpdate, Shield, Update, parts_of
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.observers import observers_of
from fshard.runtime.execution.pending_update import joined
from fshard.runtime.steps import Latest
from fshard.runtime.steps.batch_rows import rows_of
from fshard.runtime.steps.consensus import FAILED, OK, Columns, JointRow, status_alone
from fshard.runtime.steps.failures import together
from fshard.runtime.steps.handshake import Intent, Terms, agree
from fshard.runtime.steps.measured_rates import decided, foreseen
from fshard.runtime.steps.protocol import Meetings, Met
from fshard.runtime.steps.rank_end import End, decline, drained
from fshard.runtime.steps.step_options import RunOptions
from fshard.schedule.auto import Auto, Choice
from fshard.schedule.infos import communicators
from fshard.schedule.policy import Policy
from fshard.schedule.step_trace import Trace
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.settle import complete
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState
from fshard.torch_internals import DataDependentOutputException

PATIENCE = 3
"""Steps that may leave their schedule for such arguments before it stays: another recording takes a trace."""

CALL = "step"
"""What ranks call it when they compare their calls."""


Attempt = tuple[FunctionResult | None, Met[StepTally], Sequence[float]]
"""What a step function returned, what ranks told each other, and the mean over ranks of each plain float of that."""


class StepRunner:
    """Runs a step function.

    Args:
        fn: the function.
        plan: a plan on the mesh, whose data axes are those of the batch.
        running: how its passes are scheduled, and whether in debug mode.
        donate: whether a step takes the memory of the states that it is given.

    Attributes:
        latest: the latest step.
        choices: what ``fs.Auto`` chose for what the function does.
        replays: the steps that have a schedule.
        busy: by rank, the seconds since the step before in which it did not wait for others; empty on one rank.
    """

    def __init__(self, fn: Callable[..., Any], plan: Plan, running: RunOptions, donate: bool) -> None:
        self.fn, self.plan, self.running, self.donate = fn, plan, running, donate
        self._rows, self._meetings = rows_of(plan), Meetings(plan.mesh)
        self.busy: Sequence[float] = ()
        self.latest = Latest()
        self.choices: dict[StepRecord, Choice] = {}
        self._recorded: dict[Hashable, tuple[StepRecord | Untraced, Sequence[Plan]]] = {}
        self.replays: dict[StepRecord, Replay] = {}
        self._left: dict[Hashable, int] = {}  # how many steps have left their schedule
        self._equals: dict[int, Equal] = {}  # by the id of the plan, which lives as long as they do
        self._last: tuple[
            PendingUpdate, ...
        ] = ()  # the updates that may still read the memory of this step's gradients

    def run(self, given: Arguments, shield: Shield) -> tuple[Any, Any] | str:
        """Run the function on all ranks.

        Returns:
            What it returned; or why it must run part by part, the same on all ranks; empty if it has no passes.

        Raises:
            Exception: on all ranks alike, with every state as it was; whatever the function raises on this one.
        """
        refuse_nested(CALL)
        replay = None
        try:
            facts, recorded, replay, executor = self._ready(given, shield)
            if replay is None or executor is None:
                why = recorded.why if isinstance(recorded, Untraced) else ""
                self.latest = Latest(apart=why or "its function has no passes")
                agree(self._meetings.control, Terms(CALL, batch=given.batch, facts=facts))
                return why
            result, met, floats = self._scheduled(replay, executor, given, shield, facts)
            worst = status_alone(met.row.status).worst
            if worst == FAILED:
                self._meetings.raise_failure(met.end, met.row.status)
            if worst == OK and result is not None:
                return self._concluded(replay, result, met.row, floats, given)
        except BaseException:
            self._meetings.transport.abort(COLLECTIVES, "the step failed")
            raise
        finally:
            if replay is not None:
                replay.end()
        self._meetings.transport.abort(COLLECTIVES, "the step failed")
        self._forget(given, replay)
        self.latest = Latest(apart=f"it left its schedule: {met.end.left or 'on another rank'}")
        return self.latest.apart

    # -- prepare ------------------------------------------------------------------------------------------------------

    def _ready(
        self, given: Arguments, shield: Shield
    ) -> tuple[Facts, StepRecord | Untraced, Replay | None, Scheduled | None]:
        """Find what must be equal on all ranks, and what the function does, with its executor if it has a schedule."""
        try:
            self._check(given)
            recorded = self.recorded(given)
            facts = self._facts(given, recorded)
        except BaseException as error:
            decline(self._meetings.control, CALL, None, error)
        if isinstance(recorded, StepRecord) and recorded.passes and recorded not in self.replays:
            self._choose_policy(recorded, given, facts)
        try:
            replay = self._prepare(recorded, given.own)
            return facts, recorded, replay, None if replay is None else self._started(replay, given, shield)
        except BaseException as error:
            decline(self._meetings.control, CALL, None, error)

    def _check(self, given: Arguments) -> None:
        """Refuse states that do not fit."""
        check_detached(given.batch)
        for number, state in enumerate(given.states):
            state.check_plan(state.plan)
            check_mesh(f"state {number}", self.plan.mesh, state.plan.mesh)
        if len({id(state.memory) for state in given.states[: given.own]}) < given.own:
            raise TreeError("step(state, batch): one state was given twice")

    def _facts(self, given: Arguments, recorded: StepRecord | Untraced) -> Facts:
        """Return what must be equal on all ranks: of the states, and of the parts, if it is known which there are."""
        if self.plan.mesh.size == 1:
            return Facts()
        facts = [self._equal(state.plan).of(state) for state in given.states]
        facts += [recorded.returned] if isinstance(recorded, StepRecord) else []
        copies = [each.copies for each in facts if each.copies is not None]
        for equal, origin in recorded.equals if isinstance(recorded, StepRecord) else ():
            facts.append(equal.fixed() if origin is None else equal.of(given.states[origin]))
        return Facts(
            digest([each.number for each in facts]),
            lambda: [tier for each in facts for tier in each.items()],
            (lambda: [copy for made in copies for copy in made()]) if copies else None,
        )

    def recorded(self, given: Arguments) -> StepRecord | Untraced:
        """Return what the function does with such states and batches, if a trace can tell."""
        key = self._key(given)
        if key not in self._recorded:
            self._recorded[key] = record(self.fn, given, self.plan), [state.plan for state in given.states]
        return self._recorded[key][0]

    def _forget(self, given: Arguments, replay: Replay) -> None:
        """Record anew at the next call what the function does, which no longer does what was recorded."""
        key = self._key(given)
        self._left[key] = self._left.get(key, 0) + 1
        if self._left[key] <= PATIENCE:
            recorded = replay.step.recorded
            self._recorded.pop(key, None)
            for held in (self.replays, self.choices):
                held.pop(recorded, None)

    def _key(self, given: Arguments) -> Hashable:
        """The key of arguments. Plans live as long as their ids are keys."""
        return signature(given.state), signature(given.batch), tuple([id(state.plan) for state in given.states])

    def trace(self, recorded: StepRecord) -> Trace:
        """Return what is known of the step before it runs."""
        choice, policy = None, self.running.policy
        if isinstance(policy, Auto):
            choice = self.choices.get(recorded) or foreseen(task_of(recorded), policy)
            policy = choice.policy
        needed = dict.fromkeys(
            need for one in recorded.passes for need in communicators(one.spec.plan, (), recorded.communicates)
        )
        return Trace(scheduled(recorded, policy)[1], choice, recorded.needs, recorded.idle, tuple(needed))

    def _choose_policy(self, recorded: StepRecord, given: Arguments, facts: Facts) -> None:
        """Choose a policy, if nobody has given one. All ranks are here, with the same function, or none goes on."""
        auto = self.running.policy
        if isinstance(auto, Policy):
            return
        task, comms = task_of(recorded), Communicators(self.plan)
        text = repr(task.program)
        agree(comms.control, Terms(CALL, Intent(digest(text), lambda: text), given.batch, facts))
        comms.open()
        self.choices[recorded] = decided(self.plan, comms, task, auto)

    def _equal(self, plan: Plan) -> Equal:
        """Return what must be equal on all ranks of states with a plan."""
        if id(plan) not in self._equals:
            told = {"schedule": self.running.policy, "debug": self.running.debug}
            self._equals[id(plan)] = Equal(plan, told, always=self.running.debug)
        return self._equals[id(plan)]

    def _prepare(self, recorded: StepRecord | Untraced, own: int) -> Replay | None:
        """Return what the function does, with a schedule; None if only a real run can tell."""
        if isinstance(recorded, Untraced) or not recorded.passes:
            return None
        if recorded not in self.replays:
            policy = self.running.policy
            policy = policy if isinstance(policy, Policy) else self.choices[recorded].policy
            self.replays[recorded] = Replay((), own, ready=assemble(recorded, policy, self.running.debug))
        return self.replays[recorded]

    # -- handshake, run, consensus ------------------------------------------------------------------------------------

    def _scheduled(
        self, replay: Replay, executor: Scheduled, given: Arguments, shield: Shield, facts: Facts
    ) -> Attempt:
        step = replay.step
        rows = self._rows.of(any([each.spec.train for each in step.recorded.passes]), step.recorded.communicates)
        plain = any([each.plain or each.spec.train and not each.found.weighted for each in step.recorded.passes])
        terms = Terms(CALL, Intent(step.digest, lambda: str(step.schedule)), given.batch, facts, rows, plain)
        comms = [programs.comms for programs in step.programs]
        try:
            uneven = self._meetings.handshake(executor, terms, comms, step.recorded.communicates).uneven
            with together(self._meetings.transport):
                result, end = self._run(replay, executor, given, shield)
                attempt = executor.consensus(lambda: self._consensus(replay, executor, result, end, uneven))
        finally:
            self.latest = Latest(step.schedule, executor.record, executor.times)
            for prepared in step.passes:
                prepared.actions.stop()
        for state in given.states:
            state.memory.note_compared()
        return attempt

    def _consensus(
        self, replay: Replay, executor: Scheduled, result: FunctionResult | None, end: End, uneven: Sequence[str]
    ) -> Attempt:
        control, floats = self._meetings.control, list[float]()

        def tally() -> StepTally:
            assert result is not None
            updates = [each for final in result.finals for each in final.updates]
            return StepTally(*replay.tally(updates, returned_values(result.metrics)))

        def columns(mine: StepTally | None, busy: float) -> Columns:
            return (mine or StepTally()).columns(replay.step, busy)

        met = self._meetings.consensus(executor, end, tally, columns)
        if met.whole and control.size > 1:
            self.busy = [seconds for (seconds,) in met.row.told("busy")]
        if status_alone(met.row.status).worst == OK and met.mine is not None:
            floats = joint_floats(control, met.row, met.mine.plain, uneven)
        return result, met, floats

    def _started(self, replay: Replay, given: Arguments, shield: Shield) -> Scheduled:
        """The executor of a step on these states, whose waiting updates it applies."""
        step, updates = replay.step, list[Update]()
        held = {id(part) for state in given.states for part in parts_of(state.pending)}
        for pending in self._last:
            if id(pending) not in held:
                pending.detach()
        self._last = ()
        for number, state in enumerate(given.states):
            if state.stale:
                complete(state, self.plan.mesh)
            due = step.updates.get(number, frozenset())
            if state.pending is not None and not due.issuperset(state.pending.waiting):
                state.applied()
            updates.append(Update(state.shards(), state.pending, {}))
        executor = Scheduled(step.route, step.actions, shield, observers_of(self.plan.mesh))
        replay.begin(given.states, executor)
        for version, (_, origin) in enumerate(step.recorded.versions):
            for actions in step.of_version(version) if origin is not None else ():
                actions.start(given.states[origin or 0].shards(), updates[origin or 0])
        return executor

    def _run(
        self, replay: Replay, executor: Scheduled, given: Arguments, shield: Shield
    ) -> tuple[FunctionResult | None, End]:
        """Run the function, and what is left of the schedule."""

        def program() -> FunctionResult:
            arguments = replay.inside(given)
            inside = bind(self.plan.mesh, self.plan.data_axes, running=replay)
            with inside, self._randomness(given.states[0]), shield.opened():
                try:
                    result = replay.result(self.fn(*arguments))
                except DataDependentOutputException as error:
                    raise left_by_trace() from error
                check_data(result.metrics)
                return result

        result, end = self._meetings.run(executor, program)
        if end.status != OK:
            replay.stand_in()
        return result, drained(executor, end)

    def _randomness(self, state: TrainState) -> AbstractContextManager[None]:
        mesh = self.plan.mesh
        return seeded(state.seed, state.step, mesh.index(self.plan.data_axes), mesh.device)

    # -- conclude -----------------------------------------------------------------------------------------------------

    def _concluded(
        self, replay: Replay, result: FunctionResult, row: JointRow, floats: Sequence[float], given: Arguments
    ) -> tuple[Any, Any]:
        """The next states, and the metrics."""
        replay.marks.check(self._meetings.control, self.plan.mesh, replay.step.copied, row.told("copies"))
        numbers = Numbers(replay, result, row)
        numbers.check(self._meetings.control, self.running.debug)
        made = [self._memory(replay, final, given.states, numbers, result.copied) for final in result.finals]
        metrics = tree.mapped(numbers.named, with_floats(result.metrics, floats))
        for final, memory in zip(result.finals, made, strict=True) if self.donate else ():
            given.states[final.memory.origin].memory.donate(memory)
        finals, memories = iter(result.finals), iter(made)

        def one(inside: TrainState) -> TrainState:
            final = next(finals)
            after = final.updates[0].state if final.updates else inside
            for updated in final.updates:
                after = updated.part.after(after, numbers.skips(updated), numbers.overflows(updated))
            before = given.states[final.memory.origin]
            step, late = after_call(before.step, after.step, after.late, trained_leaves(before.plan))
            return replace(after, step=step, late=late, memory=next(memories), past=before.past.compared())

        following = tree.swap(one, TrainState, result.state)
        numbers.note()
        return following, metrics

    def _memory(
        self,
        replay: Replay,
        final: Final,
        states: Sequence[TrainState],
        numbers: Numbers,
        copied: Sequence[Updated],
    ) -> StateMemory:
        """The memory of a state that the step returns, with the updates that wait for the next forward."""
        origin = states[final.memory.origin]
        shards = replay.shards_of(final.memory)
        if not self.donate:
            origin.applied()
            shards = shards.clone()
        pendings, stale = list[PendingUpdate](), dict[int, None]()
        for updated in final.updates:
            if numbers.skips(updated):
                continue
            part, (squares, scale, _) = updated.part, numbers.of_update[updated]
            norms = part.norms.clipped(squares)
            pendings.append(part.pending(updated.state, updated.grads, norms, scale, updated.lr))
            if updated in copied:
                pendings[-1].detach()
            stale |= updated.part.updating.shared
        self._last += tuple(pendings)
        return StateMemory(origin.plan, shards, joined(pendings), stale)
