"""The programs of a step: each with a checked schedule, an engine and memory, made once and kept."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fshard.errors import PlanError, RematError
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.device_streams import copy_stream
from fshard.runtime.comm.facts import digest
from fshard.runtime.engine.engine import UNKNOWN, Engine, Sink, Traits
from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.engine.origins import Debugging
from fshard.runtime.engine.remat_rules import Remat, again
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.actions import Actions
from fshard.runtime.execution.resident import Resident
from fshard.runtime.execution.route import Route, make_route
from fshard.runtime.execution.wires import compile_kernels
from fshard.runtime.memory.activation_copies import ActivationCopies
from fshard.runtime.memory.gradients import FlatGradients, GradientBuffers
from fshard.runtime.memory.step_memory import StepMemory
from fshard.runtime.steps.backends import make_cache, packing_kernels
from fshard.runtime.steps.contests import Contest, opened
from fshard.runtime.steps.measured_rates import Again, decided, foreseen, ways
from fshard.runtime.steps.step_options import RunOptions
from fshard.schedule.activation_moves import called
from fshard.schedule.auto import Auto, Choice
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.check import check
from fshard.schedule.contest import contenders
from fshard.schedule.footprint import Need
from fshard.schedule.infos import NOTHING, StateNeeds, between, communicators, fast_axes, group_infos, stage_numel
from fshard.schedule.ops import ROOT, GroupInfo, Op
from fshard.schedule.policy import Policy
from fshard.schedule.step_trace import Trace
from fshard.schedule.transfers import KINDS
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan

if TYPE_CHECKING:
    from fshard.runtime.graphs.cache import Cache

ALIGN = 256

EngineMaker = Callable[[Plan, Sink, Remat, Traits], Engine]

Retraced = Callable[[Remat], ProgramTrace | None]
"""Traces a program with other units computed again."""


@dataclass(frozen=True)
class Prepared:
    """A program ready to run.

    Attributes:
        engine: what runs its units.
        actions: what the ops of its schedule do.
        weighted: whether the loss is an ``fs.Mean``; None if nobody knows yet.
        route: the schedule as it runs; None if the program is gathered on demand.
        axes: those over which the program communicates itself.
        digest: equal on two ranks if their schedules and these axes are; 0 for a program that is gathered on demand.
        contest: what notes its steps, while these are timed to choose a policy.
        words: return what ``digest`` is of, where that is more than the schedule.
    """

    engine: Engine
    actions: Actions
    weighted: bool | None = None
    route: Route | None = None
    axes: tuple[Axes, ...] = ()
    digest: int = 0
    contest: Contest | None = None
    words: Callable[[], str] | None = None

    def text(self) -> str:
        """Return what ``digest`` is of, in lines."""
        if self.words is not None:
            return self.words()
        if self.route is None:
            return "gathered on demand"
        return f"collectives of the program {over_text(self.axes)}\n{self.route.schedule}"


def over_text(axes: Sequence[Axes]) -> str:
    """The axes that collectives are over, in words."""
    return f"over {' and '.join(['+'.join(some) for some in axes]) or 'no axis'}"


@dataclass(frozen=True)
class Programs:
    """Makes and keeps the programs that a step has met.

    Attributes:
        plan: the plan.
        policy: how schedules are built.
        accumulate: microbatches of a step.
        train: whether there is a backward.
        comms: the communicators of the plan.
        infos: what schedules know of the groups.
        second: the same where groups stay sharded over some axes, by these: what ``fs.Auto`` may choose.
        memory: what programs share.
        remat: which units are computed again in their backward.
        cache: compiled graphs of units; None without a backend.
        engine: makes the engine of a program.
        choices: what ``fs.Auto`` chose, by program.
        contests: of programs whose steps are timed to choose better.
        made: the programs.
    """

    plan: Plan
    policy: Policy | Auto
    accumulate: int
    train: bool
    comms: Communicators
    infos: tuple[GroupInfo, ...]
    second: Mapping[Axes, tuple[GroupInfo, ...]]
    memory: StepMemory
    remat: Remat
    cache: "Cache | None"
    engine: EngineMaker = Engine
    choices: dict[str, Choice] = field(default_factory=dict)
    contests: dict[str, Contest] = field(default_factory=dict)
    made: dict[Hashable, Prepared] = field(default_factory=dict)

    def again(self, engine: EngineMaker) -> "Programs":
        """Programs of the same choices and graphs on engines and memory of their own."""
        cache = self.cache
        if cache is not None:
            report = {unit: dict(runs) for unit, runs in cache.report.items()}
            cache = replace(cache, graphs=dict(cache.graphs), report=report)
        memory = StepMemory(self.plan, self.infos, self.train, self.memory.poison, self.memory.fixed)
        return replace(
            self, memory=memory, cache=cache, engine=engine, choices=dict(self.choices), contests={}, made={}
        )

    def trace(self, found: ProgramTrace, retraced: Retraced | None = None) -> Trace:
        """Return what is known of a program before it runs. Its schedule is checked.

        Args:
            found: the program.
            retraced: traces it anew with other units computed again.
        """
        choice, needs = None, found.needs
        if isinstance(self.policy, Auto):
            choice = self.choices.get(found.program.bare.text)
            if choice is None:  # what this rank alone would choose
                choice = foreseen(self._task(found), self.policy, self._again(retraced), ways(self.plan))
                needs = tuple(choice.task.needs)
            schedule = choice.schedule
        else:
            schedule = build(found.program, self.infos, self.policy, self.accumulate, self.train)
        check(schedule)
        needed = tuple(communicators(self.plan, self.comms.secondary, found.axes))
        needed = (*needed, *between(schedule.groups))
        return Trace(schedule, choice, needs, found.idle, needed, self.direct, found.flops)

    @property
    def origin(self) -> str:
        """Say where numbers stopped being finite in the last step; empty if nobody has looked."""
        return self.engine.origins.told() if isinstance(self.engine, Debugging) else ""

    @property
    def direct(self) -> bool:
        """Tell whether unit graphs write gradients where they are flat.

        A graph writes in the dtype in which it computes.
        """
        trained = [group for group in self.plan.groups if group.trainable]
        return self.cache is not None and all(group.reduce_dtype == group.compute_dtype for group in trained)

    def undecided(self, found: ProgramTrace) -> Auto | None:
        """Return what chooses the policy of a program, where all ranks still have to do that together; else None."""
        auto, text = self.policy, found.program.bare.text
        if not isinstance(auto, Auto):
            return None
        contest = self.contests.get(text)
        return auto if text not in self.choices or (contest is not None and contest.over) else None

    def decide(self, found: ProgramTrace, first: Callable[[], tuple[Choice, Contest | None]]) -> None:
        """Choose the policy of a program: by foresight at ``first``, then by what steps take. Collective."""
        text = found.program.bare.text
        contest, choice = self.contests.pop(text, None), self.choices.get(text)
        if contest is None or choice is None:
            choice, following = first()
        else:
            self._release()
            choice, following = contest.conclude(self.comms, choice)
        self.choices[text] = replace(choice, settled=following is None)
        if following is not None:
            self.contests[text] = following

    def foreseen(self, found: ProgramTrace, auto: Auto, retraced: Retraced) -> tuple[Choice, Contest | None]:
        """The choice by rates, and the first round of its contest. Collective."""
        choice = decided(self.plan, self.comms, self._task(found), auto, self._again(retraced))
        return choice, opened(self.comms, choice, auto, lambda room: contenders(choice, room))

    def remat_of(self, found: ProgramTrace) -> Remat:
        """Say which units of a program are computed again in their backward."""
        choice = self.choices.get(found.program.bare.text)
        return again(choice.task.again, choice.task.hosted) if choice is not None and choice.task.again else self.remat

    def _again(self, retraced: Retraced | None) -> Again | None:
        """The needs of a program with units computed again or offloaded, where the user has not said which are."""
        if retraced is None or self.remat.rules or not self.train:
            return None

        def needs(units: tuple[str, ...], hosted: bool) -> tuple[Need, ...]:
            try:
                found = retraced(again(units, hosted))
            except (RematError, PlanError):
                return ()
            return found.needs if found is not None else ()

        return needs

    def _task(self, found: ProgramTrace) -> PolicyTask:
        full = all(group.reduce_dtype == group.dtype for group in self.plan.groups)
        task = PolicyTask(found.program, self.infos, found.needs, self.accumulate, full, self.train, self.second)
        return replace(task, axes=found.axes, graphs=self.direct)

    def scheduled(self, found: ProgramTrace) -> Prepared:
        """A program with its schedule, made at the first call."""
        program, weighted, foreign = found.program, found.weighted, found.foreign
        contest = self.contests.get(program.bare.text)
        timed = None if contest is None else contest.schedule.policy
        key = (program.text, weighted, foreign, found.inner, found.axes, found.exact, timed)
        if key not in self.made:
            schedule = self.trace(found).schedule if contest is None else contest.schedule
            arena = self._arena((contest or schedule.memory).arena_bytes)
            placed = self.placed(found, arena, schedule.memory.offsets)
            number = int(schedule.hash[:15], 16)
            number = digest((number, found.axes)) if found.axes else number
            route = make_route(schedule, placed.actions)
            self.made[key] = replace(
                placed, weighted=weighted, route=route, axes=found.axes, digest=number, contest=contest
            )
        return self.made[key]

    def placed(
        self, found: ProgramTrace, arena: Tensor, offsets: Mapping[str, int], beside: Actions | None = None
    ) -> Prepared:
        """A program with memory and without a schedule of its own.

        Args:
            found: the program.
            arena: the arena.
            offsets: where ``param:`` items of its groups lie.
            beside: the actions of another program that reads the same shards in the same step.
        """
        if self.train and found.scaled and self.plan.data_size * self.accumulate > 1:
            _tell_scaled(found.scaled)
        traits = Traits(found.program.reads[ROOT], found.foreign, found.exact)
        prepared = Prepared(*self._prepared(arena, offsets, traits, found.remat, beside), found.weighted)
        if found.program.hosted:
            copies = ActivationCopies(self.memory.offload, self.memory.host)
            moves = HostedActivations(prepared.engine.slots, called(found.program), copies)
            prepared.engine.units.activations = prepared.actions.activations = moves
        self._compiled(prepared, found)
        return prepared

    def on_demand(self) -> Prepared:
        """Return what runs a program that is not known yet: every group has a place of its own."""
        offsets, end = {}, 0
        for info in self.infos:
            if info.gathered:
                offsets[f"param:{info.name}"], end = end, -(-(end + info.full_bytes) // ALIGN) * ALIGN
        return Prepared(*self._prepared(self.memory.new_arena(end), offsets, UNKNOWN, self.remat))

    def closing(self, microbatch: int) -> list[Op]:
        """The reductions after a backward that ran on demand."""
        infos = [info for info in self.infos if self.train and info.reduced]
        last = microbatch == self.accumulate - 1
        rows = [row for row in KINDS.values() if row.stage == "gradient" and (last or row.each_microbatch)]
        return [
            Op(word, info.name, 0, microbatch if row.each_microbatch else 0)
            for row in rows
            for word in (row.name, row.wait)
            for info in infos
            if info.transfer(row.name)
        ]

    def _prepared(
        self,
        arena: Tensor,
        offsets: Mapping[str, int],
        traits: Traits,
        remat: Remat,
        beside: Actions | None = None,
    ) -> tuple[Engine, Actions]:
        """An engine on an arena, and what ops do to both."""
        memory, buffers = self.memory, dict[int, GradientBuffers]()
        gradients = FlatGradients(self.plan, buffers, memory.offload)
        engine = self.engine(self.plan, gradients.sink, remat, traits)
        staging = {group: stage_numel(self.plan, self.plan.groups[group]) for group in memory.reduced}
        engine.slots.place(arena, offsets, staging)
        memory.allocate()
        for group, made in memory.gradients.items():
            slots = engine.slots.groups[group]
            if slots.grad is None:
                slots.bind_grad(made.home)
            buffers[group] = GradientBuffers(**vars(made), slots=slots)
        if beside is not None:
            return engine, beside.beside(engine.slots, self.comms, gradients)
        resident = Resident(memory, packing_kernels(self.cache))
        aside = copy_stream(self.plan.mesh.device, "updates") if self.policy.update == "beside" else None
        return engine, Actions(engine.slots, self.comms, gradients, resident, memory.poison, aside)

    def _compiled(self, prepared: Prepared, found: ProgramTrace) -> None:
        if self.cache is None:
            return
        from fshard.runtime.graphs.cache import Graphs  # it imports a compiler's worth of modules

        compile_kernels(self.plan.groups, self.plan.mesh, self.cache.packing)
        engine, program = prepared.engine, found.program
        readers: Counter[int] = Counter()
        for unit in (*(call.unit for call in program.backward), ROOT, ROOT):
            readers.update(program.reads[unit])
        trained = [slots for slots in engine.slots.groups if slots.group.trainable]
        grads = {slots.group.id: slots.grads for slots in trained}
        claim = prepared.actions.gradients.claim
        if any(slots.grad is not None and slots.grad.dtype != slots.group.compute_dtype for slots in trained):
            claim = _refuse  # a graph writes in the dtype in which it computes; the sink casts
        engine.graphs = Graphs(
            self.cache, self.plan, engine, claim, grads, readers, found.inner, found.foreign, found.remat
        )

    def _arena(self, size: int) -> Tensor:
        memory = self.memory
        if memory.arena is None or memory.arena.numel() < size:
            self._release()
            memory.arena = memory.new_arena(size)
        return memory.arena

    def _release(self) -> None:
        """Let go of the arena, and of programs that hold views of it, some in cycles: they are made again."""
        for prepared in self.made.values():
            prepared.engine.release()
        self.made.clear()
        self.memory.arena = None


def make_programs(
    plan: Plan,
    running: RunOptions,
    *,
    accumulate: int = 1,
    train: bool = True,
    state: StateNeeds = NOTHING,
) -> Programs:
    """The programs of a step, of which there are none yet.

    Args:
        plan: the plan.
        running: how they run.
        accumulate: microbatches of a step.
        train: whether there is a backward.
        state: what updates take, and copies of the state.
    """
    auto = isinstance(running.policy, Auto)
    if not isinstance(running.policy, Auto) and running.policy.pipeline and plan.whole is None:
        raise PlanError(
            f"schedule=fs.Policy(pipeline={running.policy.pipeline!r}): the plan has no stages: give make_plan "
            f"stages=fs.Stages(axis), or leave pipeline= out"
        )
    secondary = running.policy.secondary if isinstance(running.policy, Policy) else fast_axes(plan) if train else ()
    infos, comms = group_infos(plan, state, () if auto else secondary), Communicators(plan, secondary)
    second = {secondary: group_infos(plan, state, secondary)} if auto and secondary else {}
    memory, cache = StepMemory(plan, infos, train, running.debug, running.graph), make_cache(running.compile)
    made = Programs(plan, running.policy, accumulate, train, comms, infos, second, memory, running.remat, cache)
    return replace(made, engine=Debugging()) if running.debug else made


def _tell_scaled(paths: Sequence[str]) -> None:
    """Say that gradients depend on how the global batch is cut."""
    warnings.warn(
        f"scale_grad_by_freq=True divides gradients of {', '.join(paths)} by how often a row occurs in a rank's "
        f"microbatch, not in the global batch: they depend on the number of ranks and on accumulate=. Leave it out, or "
        f"weigh what is read by counts over all ranks (fs.collectives.psum)",
        stacklevel=2,
    )


def _refuse(groups: Sequence[tuple[int, bool]]) -> bool:
    """Nothing may be written straight into flat gradients."""
    return False
