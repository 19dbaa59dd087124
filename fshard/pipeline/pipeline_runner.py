"""The runner of a train step whose model is cut into stages."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fshard.pipeline import staged_refusals
from fshard.pipeline.joint_schedules import joint_schedules
from fshard.pipeline.mail import Mail, MailActions
from fshard.pipeline.pipeline_trace import PipelineSchedules, PipelineTrace
from fshard.pipeline.rank_program import Lane, RankProgram
from fshard.pipeline.stage_engine import StageEngine
from fshard.pipeline.stage_needs import StageNeeds, stage_needs
from fshard.pipeline.stage_sums import StageSums
from fshard.pipeline.staged_choice import StagedOptions
from fshard.pipeline.staged_passes import StagedPasses
from fshard.pipeline.staged_task import OrderMaker, StagedTask, staged_communicators
from fshard.pipeline.staged_trace import StagedProgram, trace_stages
from fshard.runtime.comm.facts import Facts, digest
from fshard.runtime.engine.batch import check_even, formed, forms, signature
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.observers import observers_of
from fshard.runtime.execution.route import make_route
from fshard.runtime.execution.trace_program import ProgramTrace
from fshard.runtime.steps.consensus import Tally
from fshard.runtime.steps.contests import Contest, opened
from fshard.runtime.steps.finder import MANY
from fshard.runtime.steps.measured_rates import common, given_rates, measured
from fshard.runtime.steps.programs import Prepared, Programs
from fshard.runtime.steps.rank_end import decline
from fshard.runtime.steps.records import Agreed, Latest, PassResult, ProgramRun, Ready, StepRequest
from fshard.runtime.steps.runner import Runner
from fshard.runtime.steps.step_refusals import weighted_in_backward
from fshard.schedule.auto import Auto, Choice
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Policy
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan

InfosMaker = Callable[[Plan], tuple[GroupInfo, ...]]
"""Gives what schedules know of the groups of a plan."""


@dataclass(frozen=True)
class PlannedStep:
    """A program cut into stages, and what each position does.

    Attributes:
        staged: the program.
        ranks: the parts of all positions.
        schedules: their schedules.
        lanes: the ways of messages between them.
        given: a microbatch, in words.
    """

    staged: StagedProgram
    ranks: tuple[RankProgram, ...]
    schedules: PipelineSchedules
    lanes: tuple[Lane, ...]
    given: str

    def text(self) -> str:
        """Lines that are equal on all ranks of a step."""
        ranks = [f"position {at}\n{each}" for at, each in enumerate(self.schedules.ranks)]
        return "\n".join([f"a microbatch of {self.given}", *ranks])


@dataclass(frozen=True)
class StagedStep:
    """A program on its way: what all positions do, and this rank's part, ready to run.

    Attributes:
        planned: what all positions do.
        rank: this rank's part.
        prepared: this rank's part, with its memory.
        passes: runs it.
        actions: what the ops of its schedule do.
    """

    planned: PlannedStep
    rank: RankProgram
    prepared: Prepared
    passes: StagedPasses
    actions: MailActions

    @property
    def staged(self) -> StagedProgram:
        """The program, cut into stages."""
        return self.planned.staged


class PipelineRunner(Runner):
    """Runs the stages of one rank of a plan.

    Args:
        fn: the loss function.
        programs: the programs, of the plan of what this rank holds.
        order: gives the order of the pipeline.
        infos: gives what schedules know of the groups of a plan.
        call: what ranks call it when they compare their calls.
    """

    def __init__(self, fn: Any, programs: Programs, order: OrderMaker, infos: InfosMaker, call: str) -> None:
        super().__init__(fn, programs, call)
        self.order, self.infos = order, infos
        self.cuts: dict[Hashable, StagedProgram] = {}
        self.plans: dict[Hashable, PlannedStep] = {}
        self.staged: dict[int, StagedStep] = {}  # by the ids of ``plans``
        self.latest_step: StagedStep | None = None
        self._needs: dict[int, StageNeeds] = {}  # by the ids of ``plans``

    def _ready(self, given: StepRequest, found: ProgramTrace | None, parts: Sequence[Any], facts: Facts) -> Ready:
        """The stages of this rank with their memory, and the loop over their ops."""
        try:
            step = self.latest_step = self.look(parts[0])
            prepared = step.prepared
            assert prepared.route is not None
            prepared.actions.start(given.shards, given.update, self.in_backward, given.accumulated, given.feedback)
            executor = Scheduled(prepared.route, step.actions, given.shield, observers_of(self.plan.mesh))
            self.latest = Latest(prepared.route.schedule, executor.record, executor.times, prepared)
            return Ready(given, prepared, executor, parts, facts)
        except BaseException as error:
            decline(self.programs.comms.control, self.call, given.batch, error)

    def _look(self, batch: Any) -> ProgramTrace:
        """The program of a batch."""
        found = self.cut_program(self.cut_batch(batch)[0]).trace
        if found.weighted and self.in_backward:
            raise weighted_in_backward()
        return found

    def _decide(self, found: ProgramTrace, auto: Auto, batch: Any) -> None:
        """Choose the order of the stages, or hold the next round of its contest. Collective."""
        part, programs = self.cut_batch(batch)[0], self.programs
        self._release_all()  # views of the arena, which a contest makes anew

        def first() -> tuple[Choice, Contest | None]:
            rates, _ = common(programs.comms, measured(self.plan, programs.comms, auto), ())
            options = StagedOptions.of(self.task(part), auto, rates)
            choice = options.choice
            return choice, opened(programs.comms, choice, auto, lambda room: options.contenders(choice, room))

        programs.decide(found, first)

    def cut_batch(self, batch: Any) -> list[Any]:
        """The microbatches, which have one shape."""
        parts = super().cut_batch(batch)
        for number, part in enumerate(parts):
            if forms(part) != forms(parts[0]):
                raise staged_refusals.other_shapes(number, formed(part), formed(parts[0]))
        return parts

    @property
    def position(self) -> int:
        """This rank's position on the axis of stages."""
        whole = self.plan.whole
        assert whole is not None and whole.stages is not None
        return whole.mesh.index(whole.stages.axis)

    def trace(self, batch: Any) -> PipelineTrace:
        """Return what a step on batches like this one does, without running it.

        Raises:
            PlanError: as ``trace_stages``.
            BatchError: the batch cannot be cut into equal microbatches.
        """
        programs, part = self.programs, self.cut_batch(batch)[0]
        planned = self.planned(part)
        trace = planned.staged.trace
        if programs.train and not trace.weighted:
            check_even(batch, programs.accumulate)
        found = self.needs(planned, part)
        idle = None if trace.idle is None else tuple([path for path in trace.idle if path in self.plan.leaves])
        return PipelineTrace(
            planned.schedules.ranks[self.position],
            self.choice(part),
            needs=found.needs,
            idle=idle,
            communicators=self._communicators(planned),
            graphs=programs.direct,
            flops=found.flops,
            schedules=planned.schedules,
        )

    def needs(self, planned: PlannedStep, part: Any) -> StageNeeds:
        """Run the stages of this rank on fake tensors, once for each program."""
        if id(planned) not in self._needs:
            programs, rank = self.programs, planned.ranks[self.position]
            given = self.finder.fn, planned.staged, rank, self.plan, part, programs.train, programs.remat
            self._needs[id(planned)] = stage_needs(*given)
        return self._needs[id(planned)]

    def flops(self, batch: Any) -> int | None:
        """Floating-point operations of the model in a run on this batch, of the stages of this rank."""
        if self.latest_step is None:
            return None
        return self._needs[id(self.latest_step.planned)].flops * self.programs.accumulate

    def _communicators(self, planned: PlannedStep) -> tuple[tuple[str, Axes], ...]:
        """The communicators of this rank."""
        secondary, axes = self.programs.comms.secondary, planned.staged.trace.axes
        return staged_communicators(self.plan, self.position, planned.lanes, secondary, axes)

    def planned(self, part: Any) -> PlannedStep:
        """The schedules of all positions for microbatches like this one.

        Raises:
            PlanError: the order is to be chosen, and it is not known what this machine does in a second.
        """
        staged, found = self.cut_program(part), self.programs.policy
        policy = found if isinstance(found, Policy) else self._chosen(part, found)
        key = id(staged), policy
        if key not in self.plans:
            self.plans[key] = self._planned(staged, policy, formed(part))
        return self.plans[key]

    def choice(self, part: Any) -> Choice | None:
        """The choice for microbatches like this one, or that before any step; None if the policy was given.

        Raises:
            PlanError: it is not known what this machine does in a second.
        """
        auto, staged = self.programs.policy, self.cut_program(part)
        if isinstance(auto, Policy):
            return None
        found = self.programs.choices.get(staged.trace.program.bare.text)
        return found or StagedOptions.of(self.task(part), auto, given_rates(auto)).choice

    def _chosen(self, part: Any, auto: Auto) -> Policy:
        """The policy of the next step."""
        contest = self.programs.contests.get(self.cut_program(part).trace.program.bare.text)
        choice = self.choice(part)
        assert choice is not None
        return choice.policy if contest is None else contest.schedule.policy

    def task(self, part: Any) -> StagedTask:
        """The task of choosing an order for microbatches like this one.

        Raises:
            PlanError: the program cannot be cut into stages, or depends on values of tensors.
        """
        plans = self.positions()
        return StagedTask(self.finder.fn, self.programs, self.order, part, self.cut_program(part), plans, self.position)

    def cut_program(self, part: Any) -> StagedProgram:
        """The program of microbatches like this one, cut into stages.

        Raises:
            PlanError: it cannot be cut, or depends on values of tensors.
        """
        key = signature(part), tuple(forms(part))
        if key not in self.cuts:
            programs, whole = self.programs, self.plan.whole
            assert whole is not None
            self._make_room()
            self.cuts[key] = trace_stages(self.finder.fn, whole, part, programs.train, programs.remat)
        return self.cuts[key]

    def _make_room(self) -> None:
        """Let go of all programs where they are many, and say before that they become many."""
        if len(self.cuts) == MANY:
            staged_refusals.warn_of_programs(MANY)
        if len(self.cuts) < 4 * MANY:
            return
        latest = None if self.latest_step is None else id(self.latest_step.planned)  # which this step keeps
        self._needs = {key: needs for key, needs in self._needs.items() if key == latest}
        self._release_all()
        self.plans.clear()
        self.cuts.clear()

    def look(self, part: Any) -> StagedStep:
        """The step for microbatches like this one."""
        planned = self.planned(part)
        if id(planned) not in self.staged:
            if self.programs.train:
                self.needs(planned, part)  # before anything is sent, with the axes of the mesh in scope
            self.staged[id(planned)] = self._placed(planned)
        return self.staged[id(planned)]

    def _planned(self, staged: StagedProgram, policy: Policy, given: str) -> PlannedStep:
        """Schedule a program."""
        programs = self.programs
        order = self.order(policy, programs.accumulate)
        ranks, schedules, lanes = joint_schedules(staged, self.positions(), order, policy, programs.train)
        if not programs.train:
            forwards = [tuple([action for action in lane if action.kind == "F"]) for lane in order.ranks]
            order = replace(order, ranks=tuple(forwards))
        return PlannedStep(staged, tuple(ranks), PipelineSchedules(order, tuple(schedules)), tuple(lanes), given)

    def positions(self) -> list[tuple[Plan, tuple[GroupInfo, ...]]]:
        """By position the plan of what its ranks hold, and what schedules know of its groups."""
        whole = self.plan.whole
        assert whole is not None and whole.stages is not None
        count = whole.mesh.axis_size(whole.stages.axis)
        others = [whole.at_position(position, self.plan.mesh) for position in range(count)]
        plans = [*others[: self.position], self.plan, *others[self.position + 1 :]]
        return [(plan, self.infos(plan)) for plan in plans]

    def _placed(self, planned: PlannedStep) -> StagedStep:
        """A program with its memory."""
        programs, whole, staged = self.programs, self.plan.whole, planned.staged
        assert whole is not None and whole.stages is not None
        rank, schedule = planned.ranks[self.position], planned.schedules.ranks[self.position]
        engine = functools.partial(StageEngine, staged=staged, stages=rank.stages)
        found = replace(staged.trace, program=rank.program)
        contest = programs.contests.get(staged.trace.program.bare.text)
        arena = self._arena((contest or schedule.memory).arena_bytes)
        placed = replace(programs, engine=engine).placed(found, arena, schedule.memory.offsets)
        mail = Mail(whole.mesh, whole.stages.axis, rank.messages, planned.lanes)
        actions = MailActions(placed.actions, mail, StageSums(whole, self.plan, placed.actions.gradients))
        route = make_route(schedule, actions)
        number = digest([each.hash for each in planned.schedules.ranks])
        settings = self.finder.fn, programs.train, self.in_backward, self.divisor
        passes = StagedPasses(*settings, staged=staged, rank=rank, mail=mail)
        prepared = replace(placed, weighted=staged.trace.weighted, route=route, axes=staged.trace.axes, digest=number)
        prepared = replace(prepared, contest=contest, words=planned.text)
        return StagedStep(planned, rank, prepared, passes, actions)

    def _arena(self, size: int) -> Tensor:
        """The arena, which all programs of the step share; those that are views of a smaller one are made again."""
        memory = self.programs.memory
        if memory.arena is None or memory.arena.numel() < size:
            self._release_all()
            memory.arena = memory.new_arena(size)
        return memory.arena

    def _release_all(self) -> None:
        """Let go of all programs, which hold views of the arena: they are made again."""
        for step in self.staged.values():
            step.prepared.engine.release()
        self.staged.clear()

    def _step_of(self, prepared: Prepared) -> StagedStep:
        return next(step for step in self.staged.values() if step.prepared is prepared)

    def _handshake(self, ready: Ready, mode: int = 0) -> Agreed:
        agreed = super()._handshake(ready, mode)
        self._step_of(ready.prepared).actions.open(self._meetings.transport)
        return agreed

    def _tally(self, ran: ProgramRun) -> Tally:
        """Read what this rank's stages came to."""
        step = self._step_of(ran.agreed.ready.prepared)
        return replace(super()._tally(ran), idle=step.rank.stages[-1] + 1 < len(step.staged.last))

    def _program(self, agreed: Agreed) -> PassResult:
        """Run the stages of this rank."""
        executor, given = agreed.ready.executor, agreed.ready.request
        assert isinstance(executor, Scheduled) and isinstance(agreed.ready.prepared.engine, StageEngine)
        step = self._step_of(agreed.ready.prepared)
        engine, parts = agreed.ready.prepared.engine, agreed.ready.parts
        try:
            with given.randomness():
                return step.passes.run_stages(engine, executor, parts, given.loss_scale, given.shield.opened)
        except Mispredicted as reason:  # other ranks run a schedule, so this one cannot gather on demand
            raise staged_refusals.left_its_schedule(reason) from None
