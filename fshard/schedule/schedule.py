"""The schedule of one step, as a value."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule.compatibility import refuse_misfits
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule_memory import ScheduleMemory, plan_memory
from fshard.schedule.step_program import StepProgram, as_step_program
from fshard.schedule.text import render, scan
from fshard.schedule.transfers import KINDS

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

    >>> import torch, fshard as fs
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
        return plan_memory(self.ops, self.groups, self.stages, self.policy.graph == "step")

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
