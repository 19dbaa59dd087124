"""From what a step function does to one schedule, with an engine for each pass and one place for each group."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fshard.parts.copy_marks import axes_of_copies
from fshard.parts.record import RecordedLocal, RecordedPass, StepRecord
from fshard.parts.told_rates import TOLD
from fshard.runtime.comm.facts import digest
from fshard.runtime.execution.actions import Actions, Run
from fshard.runtime.execution.route import Route, make_route
from fshard.runtime.steps import Programs
from fshard.runtime.steps.programs import Prepared
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.check import check
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Local, Pass, StepProgram
from fshard.schedule.transfers import KINDS, Transfer, awaited, started
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class TableEntry:
    """A group of the schedule of a step.

    Attributes:
        version: the parameters that it is of; or with ``bank``, those that the gradient is of.
        group: its id in the plan.
        bank: the pass that fills its gradient; None if none does.
        read: whether passes read it: a second gradient of the same parameters is an entry of its own.
    """

    version: int
    group: int
    bank: int | None = None
    read: bool = True


@dataclass
class StepTable:
    """The groups of the schedule of a step.

    Attributes:
        recorded: what the step function does.
        entries: what each group is of.
        infos: what schedules know of each.
        params: the group by version and id in the plan.
        grads: the group by pass and id in the plan.
    """

    recorded: StepRecord
    entries: list[TableEntry] = field(default_factory=list)
    infos: list[GroupInfo] = field(default_factory=list)
    params: dict[tuple[int, int], int] = field(default_factory=dict)
    grads: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first: dict[tuple[int, int], int] = {}
        for number, each in enumerate(self.recorded.passes):
            for group in each.spec.plan.groups if each.spec.train else ():
                if group.trainable:
                    first.setdefault((self.recorded.home(each.version, group.id), group.id), number)
        for version, (plan, _) in enumerate(self.recorded.versions):
            self._add_version(version, plan, first)
        for number, each in enumerate(self.recorded.passes):
            self._add_bank(number, each, first)

    def _add_version(self, version: int, plan: Plan, first: Mapping[tuple[int, int], int]) -> None:
        infos = group_infos(plan)
        for group in plan.groups:
            if (home := self.recorded.home(version, group.id)) != version:
                self.params[version, group.id] = self.params[home, group.id]
                continue
            info, bank = infos[group.id], first.get((version, group.id))
            kept = [transfer for transfer in info.transfers if transfer.row.stage != "gradient"]
            if bank is None:
                info = replace(info, trainable=False, grad_bytes=0, own_bytes=0, transfers=_ordered(kept))
            else:
                filled = group_infos(self.recorded.passes[bank].spec.plan)[group.id]
                path = [transfer for transfer in filled.transfers if transfer.row.stage == "gradient"]
                info = replace(filled, update_bytes=info.update_bytes, transfers=_ordered([*kept, *path]))
                self.grads[bank, group.id] = len(self.infos)
            self.params[version, group.id] = len(self.infos)
            self._add(TableEntry(version, group.id, bank), info, version)

    def _add_bank(self, number: int, each: RecordedPass, first: Mapping[tuple[int, int], int]) -> None:
        infos = group_infos(each.spec.plan)
        for group in each.spec.plan.groups if each.spec.train else ():
            home = self.recorded.home(each.version, group.id)
            if group.trainable and first[home, group.id] != number:
                path = [transfer for transfer in infos[group.id].transfers if transfer.row.stage == "gradient"]
                self.grads[number, group.id] = len(self.infos)
                info = replace(infos[group.id], full_bytes=0, transfers=tuple(path))
                self._add(TableEntry(home, group.id, number, False), info, number)

    def _add(self, entry: TableEntry, info: GroupInfo, number: int) -> None:
        name, taken = info.name, {other.name for other in self.infos}
        while name in taken:
            name = f"{info.name}~{number}"
            number += 1
        self.entries.append(entry)
        self.infos.append(replace(info, name=name))

    def stages(self) -> StepProgram:
        """Return what the step does, in the words of schedules."""
        return StepProgram(tuple([self._stage(stage) for stage in self.recorded.stages]), self._updates())

    def _stage(self, stage: RecordedPass | RecordedLocal) -> Pass | Local:
        if isinstance(stage, RecordedPass):
            return self._pass(stage)
        if stage.what == "bank":
            return Local(gradients=tuple([at for (bank, _), at in self.grads.items() if bank == stage.number]))
        if stage.what == "make":
            own = [at for at, entry in enumerate(self.entries) if entry.read and entry.version == stage.number]
            return Local(makes=tuple(own))
        due, version = self._updates(), self.version_of(stage.number)
        return Local(updated=tuple([at for (number, _), at in self.params.items() if number == version and at in due]))

    def _pass(self, stage: RecordedPass) -> Pass:
        number, program = self.recorded.passes.index(stage), stage.found.program

        def of(groups: Sequence[int]) -> tuple[int, ...]:
            return tuple([self.params[stage.version, group] for group in groups])

        reads = {unit: of(groups) for unit, groups in program.reads.items()}
        filled = {group: at for (bank, group), at in self.grads.items() if bank == number}
        gradients = {self.params[stage.version, group]: at for group, at in filled.items()}
        program = Program(program.forward, program.backward, reads, hosted=program.hosted)
        return Pass(program, stage.spec.accumulate, gradients)

    def version_of(self, state: int) -> int | None:
        """The version of parameters that a given state is; None if no pass reads it."""
        found = [number for number, (_, given) in enumerate(self.recorded.versions) if given == state]
        return found[0] if found else None

    def _updates(self) -> dict[int, int | None]:
        """The groups whose update waits when the step begins, and whose gradient memory it reads."""
        due: dict[int, int | None] = {}
        for update in self.recorded.updates:
            version = self.version_of(update.origin)
            for group in update.part.form.groups if version is not None else ():
                at = self.params[version, group.id] if version is not None else 0
                if due.get(at) is None:
                    due[at] = None if update.bank is None else self.grads.get((update.bank, group.id))
        return due


def _ordered(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Transfers in the order of a path."""
    order = [*KINDS]
    return tuple(sorted(transfers, key=lambda transfer: order.index(transfer.kind)))


class StepActions:
    """The actions of a step's schedule: those of each pass, and the updates of the states that it was given.

    Args:
        table: the groups of the schedule.
        passes: each pass with its memory.
    """

    def __init__(self, table: StepTable, passes: Sequence[Prepared]) -> None:
        self.table, self.passes = table, passes
        self.readable: set[int] = set()  # each pass has its own
        self.home: dict[int, Actions] = {}
        for prepared, each in zip(passes, table.recorded.passes, strict=True):
            self.home.setdefault(each.version, prepared.actions)
        self._places = [(entry.version, entry.group) for entry in table.entries]

    def bind(self, ops: Sequence[Op]) -> list[Run | None]:
        """Return what to call for each op; None for computes, updates, the handshake and the consensus."""
        known = {info.name: number for number, info in enumerate(self.table.infos)}
        pairs = zip(self.passes, self.table.recorded.passes, strict=True)
        of_microbatch = [prepared.actions for prepared, each in pairs for _ in range(each.spec.accumulate)]
        runs: list[Run | None] = []
        for op in ops:
            row = started(op.kind) or awaited(op.kind)
            if row is not None and row.stage == "activation":
                runs += of_microbatch[op.microbatch].bind([op])
            else:
                runs.append(self._bound(op, known[op.target]) if op.target in known else None)
        return runs

    def _bound(self, op: Op, number: int) -> Run | None:
        entry, row = self.table.entries[number], started(op.kind) or awaited(op.kind)
        if row is not None and row.stage == "gradient":
            actions = self.passes[entry.bank or 0].actions
        else:
            actions = self.home[entry.version]
        name = actions.slots.groups[entry.group].group.name
        (run,) = actions.bind([replace(op, target=name)])
        return run

    def apply(self, groups: Sequence[int]) -> None:
        """Update these groups, where a step has left an update for them."""
        by_version: dict[int, list[int]] = {}
        for number in groups:
            version, group = self._places[number]
            by_version.setdefault(version, []).append(group)
        for version, own in by_version.items():
            self.home[version].apply(own)

    def where(self, name: str) -> str:
        """The unit and the leaves of a group, as an error names them; empty if there is no such group."""
        for info, entry in zip(self.table.infos, self.table.entries, strict=True):
            if info.name == name:
                slots = self.home[entry.version].slots.groups[entry.group]
                return self.home[entry.version].where(slots.group.name)
        return ""


@dataclass(frozen=True, eq=False)
class Assembled:
    """A step function ready to run.

    Attributes:
        table: what it does, and the groups of its schedule.
        route: its schedule as it runs.
        programs: those of each pass.
        passes: each pass with its memory.
        stages: what it does, in the words of schedules.
        actions: what ops do.
        first: the number of the first microbatch of each pass.
        digest: equal on two ranks if their schedules and the axes of their collectives are.
    """

    table: StepTable
    route: Route
    programs: tuple[Programs, ...]
    passes: tuple[Prepared, ...]
    stages: StepProgram
    actions: StepActions
    first: tuple[int, ...]
    digest: int

    @property
    def recorded(self) -> StepRecord:
        """Return what the step function does."""
        return self.table.recorded

    @functools.cached_property
    def pairs(self) -> int:
        """The count of totals and counts that ranks sum at the end of the step: of losses and auxiliary means."""
        return sum([2 + 2 * each.named[0] for each in self.recorded.passes])

    @functools.cached_property
    def width(self) -> int:
        """The count of all numbers that ranks sum then."""
        sets: list[int] = [update.part.norms.sets for update in self.recorded.updates]
        return self.pairs + sum([TOLD + one for one in sets])

    @functools.cached_property
    def copied(self) -> list[Axes]:
        """The sets of axes over which ranks hold copies of what the step trains."""
        return axes_of_copies([plan for plan, _ in self.recorded.versions])

    @property
    def schedule(self) -> Schedule:
        """Its schedule."""
        return self.route.schedule

    @functools.cached_property
    def updates(self) -> Mapping[int, frozenset[int]]:
        """The groups of each given state, by its number, whose waiting update the schedule applies."""
        found: dict[int, set[int]] = {state: set() for _, state in self.recorded.versions if state is not None}
        for at, entry in enumerate(self.table.entries):
            state = self.recorded.versions[entry.version][1]
            if state is not None and entry.read and at in self.stages.updates:
                found[state].add(entry.group)
        return {state: frozenset(groups) for state, groups in found.items()}

    def readable(self, number: int) -> Callable[[Sequence[int]], bool]:
        """Return what tells whether all of some groups can be read in a pass now."""
        version, own = self.recorded.passes[number].version, self.passes[number].actions.readable
        base, shared = self.recorded.bases[version], self.recorded.shared[version]
        if base is None:
            return own.issuperset
        theirs = self.actions.home[base].readable
        return lambda groups: all([group in (theirs if group in shared else own) for group in groups])

    def of_version(self, version: int) -> list[Actions]:
        """The actions of the passes that read a version of parameters."""
        pairs = zip(self.passes, self.recorded.passes, strict=True)
        return [prepared.actions for prepared, each in pairs if each.version == version]


def scheduled(recorded: StepRecord, policy: Policy) -> tuple[StepTable, Schedule]:
    """The groups of a step function, and its checked schedule. Needs no processes."""
    table = StepTable(recorded)
    schedule = build(table.stages(), table.infos, policy)
    check(schedule)
    return table, schedule


def task_of(recorded: StepRecord) -> PolicyTask:
    """Return what a policy is chosen for."""
    table = StepTable(recorded)
    full = all([g.reduce_dtype == g.dtype for each in recorded.passes for g in each.spec.plan.groups])
    return PolicyTask(table.stages(), table.infos, recorded.needs, full=full, axes=recorded.communicates)


def assemble(recorded: StepRecord, policy: Policy, debug: bool) -> Assembled:
    """A step function with its schedule and memory."""
    table, schedule = scheduled(recorded, policy)
    memory = schedule.memory
    programs = tuple([each.spec.programs(debug) for each in recorded.passes])
    arena: Tensor = programs[0].memory.new_arena(memory.arena_bytes)
    programs[0].memory.arena = arena
    home: dict[int, Actions] = {}
    passes: list[Prepared] = []
    first: list[int] = []
    for made, each in zip(programs, recorded.passes, strict=True):
        offsets = {}
        for group in each.spec.plan.groups:
            item = f"param:{table.infos[table.params[each.version, group.id]].name}"
            if item in memory.offsets:
                offsets[f"param:{group.name}"] = memory.offsets[item]
        prepared = made.placed(each.found, arena, offsets, home.get(each.version))
        home.setdefault(each.version, prepared.actions)
        first.append(first[-1] + recorded.passes[len(passes) - 1].spec.accumulate if passes else 0)
        passes.append(prepared)
    actions = StepActions(table, passes)
    route = make_route(schedule, actions)
    number = digest((int(schedule.hash[:15], 16), recorded.axes, [each.found.axes for each in recorded.passes]))
    return Assembled(table, route, programs, tuple(passes), table.stages(), actions, tuple(first), number)
