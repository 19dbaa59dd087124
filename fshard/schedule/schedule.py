"""The schedule of one step, as a value, and what is wrong with the parts of one."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, overload

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule import schedule_refusals
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule_memory import ScheduleMemory, plan_memory
from fshard.schedule.step_program import Local, Pass, StepProgram, as_step_program
from fshard.schedule.text import render, scan
from fshard.schedule.transfers import KINDS

T = TypeVar("T")


def refuse_misfits(
    groups: Sequence[GroupInfo], program: Program | StepProgram, policy: Policy, accumulate: int, train: bool
) -> None:
    """Raise PlanError if the parts of a schedule do not belong together."""
    problems = list(_unknown(groups, program))
    if type(accumulate) is not int or accumulate < 1:
        problems.append(f"accumulate={accumulate!r} is not an int of at least 1")
    if isinstance(program, StepProgram) and not problems:
        if accumulate != 1:
            problems.append(
                f"accumulate={accumulate}: the microbatches of a step of several stages are those of its passes"
            )
        problems += _Crossed(groups, as_step_program(program, groups, 1, train), train).problems(policy)
    if problems:
        raise schedule_refusals.bad_program(problems)


def _unknown(groups: Sequence[GroupInfo], program: Program | StepProgram) -> Iterator[str]:
    """Groups that are not there, or twice."""
    names, count = [group.name for group in groups], f"there are {len(groups)} groups"
    known = {*range(len(names))}
    yield from (f"{names.count(name)} groups have the name {name!r}" for name in _repeated(names))
    if isinstance(program, Program):
        yield from (f"{what}; {count}" for what in _read_beyond(program, len(names)))
        return
    for number, each in enumerate(program.passes):
        yield from (f"pass {number}: {what}; {count}" for what in _read_beyond(each.program, len(names)))
        for read, group in (each.gradients or {}).items():
            if {read, group} - known:
                yield f"pass {number} fills the gradient of group {group} by group {read}; {count}"
    for number, local in enumerate(program.locals):
        yield from (f"local {number}: {what}; {count}" for what in _named_beyond(local, len(names)))
    for group, gradient in program.updates.items():
        if {group, gradient} - known - {None}:
            yield f"updates has group {group} with the gradient of group {gradient}; {count}"


def _read_beyond(program: Program, count: int) -> Iterator[str]:
    for unit, ids in program.reads.items():
        yield from (f"unit {unit!r} reads group {i}" for i in ids if i >= count)


def _named_beyond(local: Local, count: int) -> Iterator[str]:
    for name, ids in vars(local).items():
        yield from (f"{name} has group {g}" for g in ids if not 0 <= g < count)
        yield from (f"{name} has group {g} twice" for g in _repeated(ids))


class _Crossed:
    """Problems between the stages of a step whose groups are all known."""

    def __init__(self, groups: Sequence[GroupInfo], stages: StepProgram, train: bool) -> None:
        self.groups, self.stages, self.train = groups, stages, train
        self.names = [group.name for group in groups]

    def problems(self, policy: Policy) -> Iterator[str]:
        """All of it."""
        yield from self._filled()
        yield from self._ordered()
        yield from self._updated()
        own = {g: g for g, group in enumerate(self.groups) if group.trainable}
        if self.train and policy.update != "deferred" and (len(self.stages.stages) > 1 or self.stages.updates != own):
            yield (
                f"update={policy.update!r} goes with a step of one pass, each trainable group updated with its own "
                "gradient: use update='deferred'"
            )

    def _filled(self) -> Iterator[str]:
        """Gradients are those of trainable groups, each filled by one pass, through one group."""
        filled: dict[int, str] = {}
        for number, each in enumerate(self.stages.passes):
            for read, group in (each.gradients or {}).items():
                if not self.train:
                    yield f"pass {number} fills the gradient of {self.names[group]!r} in an eval step"
                elif not self.groups[group].trainable:
                    yield f"pass {number} fills the gradient of {self.names[group]!r}, which is frozen"
                if group in filled:
                    yield (
                        f"the gradient of {self.names[group]!r} is filled by {filled[group]} and by pass {number}: "
                        "give the second one a group of its own"
                    )
                filled[group] = f"pass {number}, through {self.names[read]!r},"
        for group, info in enumerate(self.groups):
            if self.train and info.trainable and group not in filled:
                yield f"group {info.name!r} is trainable, and no pass fills its gradient"

    def _ordered(self) -> Iterator[str]:
        """Locals read gradients that were filled before, and make groups, once, that are read after."""
        filled: set[int] = set()
        read: dict[int, int] = {}
        made: dict[int, int] = {}
        passes = locals_ = 0
        for stage in self.stages.stages:
            if isinstance(stage, Pass):
                filled.update((stage.gradients or {}).values())
                for group in (g for ids in stage.program.reads.values() for g in ids):
                    read.setdefault(group, passes)
                passes += 1
            else:
                yield from self._local(stage, locals_, filled, read, made)
                made |= dict.fromkeys(stage.makes, locals_)
                locals_ += 1

    def _local(
        self, local: Local, number: int, filled: set[int], read: dict[int, int], made: dict[int, int]
    ) -> Iterator[str]:
        for group in local.gradients:
            if group not in filled:
                yield f"local {number} reads the gradient of {self.names[group]!r}, which no pass before it fills"
        for group in local.updated:
            if group not in self.stages.updates:
                yield f"local {number} waits for the update of {self.names[group]!r}, which has none pending"
        for group in local.makes:
            name = self.names[group]
            if group in read:
                yield f"pass {read[group]} reads {name!r} before local {number} makes it"
            if group in made:
                yield f"{name!r} is made by local {made[group]} and by local {number}: each needs a group of its own"
            if group in self.stages.updates:
                yield f"local {number} makes {name!r}, which has an update pending: it is made or updated, not both"

    def _updated(self) -> Iterator[str]:
        for group, gradient in self.stages.updates.items():
            if not self.train:
                yield f"{self.names[group]!r} has a pending update in an eval step"
            elif gradient is not None and not self.groups[gradient].trainable:
                name = self.names[gradient]
                yield f"the update of {self.names[group]!r} reads the gradient of {name!r}, which is frozen"


def _repeated(items: Sequence[T]) -> list[T]:
    return [item for item, count in Counter(items).items() if count > 1]


COLORS = {"forward": "#5b7fb5", "backward": "#34548a", "update": "#9b7fb0", "free": "#e3e5ea"}
"""Of ops that are no transfers; starts of transfers are orange, waits are dark orange, and all others gray."""

START, WAIT, OTHER = "#d9914b", "#a35c1a", "#c4c7cf"


def render_html(schedule: Any) -> str:
    """A schedule as a notebook shows it."""
    sent = sum(transfer.sent for group in schedule.groups for transfer in group.transfers)
    arena = size_text(schedule.memory.arena_bytes)
    told = f"{len(schedule.ops)} ops, {len(schedule.groups)} groups, an arena of {arena}, {schedule.policy}"
    groups = markup.table(["group", "gathered", "shard", "gradient", "transfers"], _rows(schedule.groups))
    return markup.shown(
        told,
        _strip(schedule.ops),
        markup.fold(f"{len(schedule.groups)} groups; a rank sends {size_text(sent)} for one transfer of each", groups),
        markup.fold("the schedule as text", markup.pre(str(schedule))),
    )


def _rows(groups: Sequence[GroupInfo]) -> list[list[str]]:
    return [
        [
            group.name,
            f"{group.full_bytes:,}",
            f"{group.shard_bytes:,}",
            f"{group.grad_bytes:,}",
            ", ".join(transfer.kind for transfer in group.transfers),
        ]
        for group in groups
    ]


def _strip(ops: Sequence[Op]) -> str:
    """A box for each op, in their order; the pointer on it tells which."""
    cells = "".join(
        f'<div title="{number} {markup.escape(str(op))}" style="width:{14 if op.kind in COLORS else 7}px;height:16px;'
        f'background:{_color(op)}"></div>'
        for number, op in enumerate(ops)
    )
    named = [*COLORS.items(), ("start of a transfer", START), ("wait", WAIT)]
    keys = " ".join(f'<span style="color:{color}">&#9632;</span> {name} &nbsp;' for name, color in named)
    return f'<div style="display:flex;flex-wrap:wrap;gap:1px;margin:4px 0">{cells}</div><div>{keys}</div>'


def _color(op: Op) -> str:
    if op.kind in COLORS:
        return COLORS[op.kind]
    if op.kind in KINDS:
        return START
    return WAIT if op.kind.startswith("wait ") else OTHER


@dataclass(frozen=True, repr=False)
class Schedule:
    """The ops of one step in order, and what they speak of: a sequence of ops that prints, parses and
    compares.

    ``build`` makes them. The constructor only sees that its parts belong together; ``check`` sees that the
    ops are right.

    Args:
        ops: the ops, in the order in which every rank runs them.
        groups: the groups, by id.
        program: what the loss function does, or the stages of a step function.
        policy: what the schedule was built from.
        accumulate: microbatches in the step; 1 for stages, whose passes have their own.
        train: False for forward only.

    Raises:
        PlanError: a unit reads a group that does not exist, two groups have one name, accumulate is below 1, or the
            stages contradict each other. All problems are listed.

    >>> mesh = fs.abstract_mesh((4,), ("data",))
    >>> plan = fs.make_plan({"w": torch.zeros(6, 2)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    >>> step = fs.make_train_step(lambda params, x: (x @ params["w"]).sum(), fs.optim.sgd(0.1), plan)
    >>> schedule = step.trace(torch.ones(3, 6)).schedule
    >>> len(schedule), str(schedule[2])
    (10, 'all_gather root')
    """

    ops: tuple[Op, ...]
    groups: tuple[GroupInfo, ...]
    program: Program | StepProgram
    policy: Policy
    accumulate: int = 1
    train: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "groups", tuple(self.groups))
        refuse_misfits(self.groups, self.program, self.policy, self.accumulate, self.train)

    @cached_property
    def stages(self) -> StepProgram:
        """Return what the step does, with the gradients that each pass fills written out. A program is one pass."""
        return as_step_program(self.program, self.groups, self.accumulate, self.train)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the text form, in hex: equal on two ranks if and only if their schedules are."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @cached_property
    def memory(self) -> ScheduleMemory:
        """Return what the arena holds at each op, and where.

        Raises:
            ScheduleError: the ops open or close a lifetime twice.
        """
        return plan_memory(self.ops, self.groups, self.stages, self.policy.graph != "none")

    def __str__(self) -> str:
        return render((self.ops, self.groups, self.program, self.policy, self.accumulate, self.train))

    def __repr__(self) -> str:
        kind = "train" if self.train else "eval"
        calls = sum([len(each.program.forward) for each in self.stages.passes])
        whole = isinstance(self.program, Program)
        step = f"accumulate={self.accumulate}" if whole else f"{len(self.stages.passes)} passes"
        return (
            f"<Schedule {kind}, {len(self.ops)} ops, {len(self.groups)} groups, {calls} calls, {step}, {self.policy}>"
        )

    def _repr_html_(self) -> str:
        return render_html(self)

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    @overload
    def __getitem__(self, key: int) -> Op: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, key: int | slice) -> Op | tuple[Op, ...]:
        return self.ops[key]


def parse(text: str) -> Schedule:
    """The schedule with this text form: ``parse(str(schedule)) == schedule``.

    Raises:
        ScheduleError: a line cannot be read; it is named by its number and text.
        PlanError: the values cannot be together.
    """
    return Schedule(*scan(text))
