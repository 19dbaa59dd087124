"""Programs, groups and policies that do not belong together. All problems are in one report."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

from fshard.schedule import schedule_refusals
from fshard.schedule.ops import GroupInfo, Program
from fshard.schedule.policy import Policy
from fshard.schedule.step_program import Local, Pass, StepProgram, as_step_program

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
