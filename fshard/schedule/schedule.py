"""The schedule of one step, as a value."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from fshard.schedule.compatibility import refuse_misfits
from fshard.schedule.html import render_html
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule_memory import ScheduleMemory, plan_memory
from fshard.schedule.step_program import StepProgram, as_step_program
from fshard.schedule.text import render, scan


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
