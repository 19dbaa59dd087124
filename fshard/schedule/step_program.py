"""A step of several passes, with code of its own between them.

A step function runs functions of sharded parameters, forward and backward, and computes on the shards in between: two
gradients of one loss, two losses of one model, weights that it has changed. ``StepProgram`` says what such a step
does, in order. A train step is one pass, after which nothing is computed.

The groups of a schedule are then what this step moves, not what a plan holds: parameters that a step has changed are a
group beside those of the state, and a second gradient of the same parameters is a group that no unit reads.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fshard.schedule import schedule_refusals
from fshard.schedule.ops import LOCAL, GroupInfo, Op, Program

T = TypeVar("T")


class Portion(NamedTuple):
    """Compute ops of one microbatch that follow each other, by number: from ``first`` up to, not with, ``end``."""

    microbatch: int
    first: int
    end: int


class Edge(NamedTuple):
    """A value that another rank computes or reads, and what of it this rank does.

    Attributes:
        group: the group that stands for it, whose one transfer sends or receives it.
        at: the compute op, among those of a microbatch, after which it is sent, or before which it is received.
        most: the messages that may be under way at a time.
    """

    group: int
    at: int
    most: int = 1


@dataclass(frozen=True)
class Pass:
    """A run of one function inside of a step, forward and backward, microbatch by microbatch.

    A pass whose program has no backward and whose ``gradients`` are ``{}`` runs forward only. In a pipeline a rank has
    a part of the program, whose microbatches take turns: ``order`` says how, and ``edges`` what goes between ranks.

    Args:
        program: what the function calls and reads: ids of groups of the schedule.
        accumulate: microbatches.
        gradients: the group whose gradient its backward fills, by the group that is read. Groups that are missing get
            no gradient from this pass; those that it does not read get zeros. None: each trainable group that it reads
            fills its own, and the last such pass fills those that no pass reads.
        order: the portions of microbatches in the order in which they run; empty where each microbatch runs as a whole.
        edges: what this rank sends and receives in each microbatch.

    Raises:
        PlanError: accumulate is not an int of at least 1, or the order does not run each op of each microbatch once.

    >>> from fshard.schedule import Call, Program
    >>> Pass(Program((Call("layer"),), (Call("layer"),), {"layer": (0,)}), gradients={0: 1}).gradients
    {0: 1}
    """

    program: Program
    accumulate: int = 1
    gradients: Mapping[int, int] | None = field(default=None, hash=False)
    order: tuple[Portion, ...] = ()
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise schedule_refusals.bad_program([f"accumulate={self.accumulate!r} is not an int of at least 1"])
        object.__setattr__(self, "order", tuple([Portion(*portion) for portion in self.order]))
        object.__setattr__(self, "edges", tuple([Edge(*edge) for edge in self.edges]))
        if problems := _disordered(self):
            raise schedule_refusals.bad_program(problems)
        if self.gradients is not None:  # one order whatever the given dict has: equal passes have equal texts
            object.__setattr__(self, "gradients", dict(sorted(self.gradients.items())))

    @functools.cached_property
    def portions(self) -> tuple[Portion, ...]:
        """The portions of microbatches in the order in which they run."""
        whole = len(self.program.computes)
        return self.order or tuple([Portion(microbatch, 0, whole) for microbatch in range(self.accumulate)])

    def is_call(self, number: int) -> bool:
        """Tell whether a compute op of the program is a call of a unit."""
        return 0 < number < len(self.program.computes) - 1

    def turns_between(self, one: int, other: int) -> bool:
        """Tell whether compute turns round between two ops of the sequence: to the backward, or to another portion."""
        (first, a), (second, b) = self.sequence[one], self.sequence[other]
        forwards = len(self.program.forward)
        return first != second or b != a + 1 or a == forwards

    @functools.cached_property
    def filled(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """The positions, among ``sequence``, of the first and the last op that fills a gradient.

        By microbatch and by the group that is read. A gradient that no op fills is complete, with zeros, at the end of
        the microbatch: its first position is behind its last.
        """
        found: dict[tuple[int, int], tuple[int, int]] = {}
        ends: dict[int, int] = {}
        for position, (microbatch, at) in enumerate(self.sequence):
            ends[microbatch] = position
            for group in self.program.fills(self.program.computes[at]):
                key = microbatch, group
                found[key] = found.get(key, (position, position))[0], position
        for microbatch, end in ends.items():
            for group in self.gradients or {}:
                found.setdefault((microbatch, group), (end + 1, end))
        return found

    @functools.cached_property
    def sequence(self) -> tuple[tuple[int, int], ...]:
        """The microbatch of each compute op of the pass, and its number among those of the program."""
        return tuple([(part.microbatch, at) for part in self.portions for at in range(part.first, part.end)])


@dataclass(frozen=True)
class Local:
    """Code of the step function between passes, on this rank's shards.

    Args:
        gradients: groups whose gradient it reads: their whole path is over before it.
        updated: groups whose pending update is applied before it, and shared with other ranks.
        makes: groups whose shards it writes: they are gathered after it.

    >>> Local(gradients=(0,), makes=(1,))
    Local(gradients=(0,), updated=(), makes=(1,))
    """

    gradients: tuple[int, ...] = ()
    updated: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("gradients", "updated", "makes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class Filling(NamedTuple):
    """A source of a gradient: ``program``, through the group that it reads as ``read``, in microbatches of the step."""

    program: Program
    read: int
    first: int
    last: int


@dataclass(frozen=True)
class StepProgram:
    """Passes of a step and code between them, in order.

    Args:
        stages: its passes, and its code between them.
        updates: the groups whose update is pending when the step begins, and for each the group whose gradient memory
            that update reads, which holds what the step before has left there. None: it reads memory that the schedule
            does not account for.

    Raises:
        PlanError: a stage is neither a pass nor a local, or there is none.

    >>> from fshard.schedule import Call, Program
    >>> reads = [Program((Call("layer"),), (Call("layer"),), {"layer": (group,)}) for group in (0, 1)]
    >>> perturb = Local(gradients=(0,), updated=(0,), makes=(1,))
    >>> step = StepProgram((Pass(reads[0]), perturb, Pass(reads[1])), updates={0: 1})
    >>> print(*step.steps, sep=", ")
    forward root, forward layer, backward layer, backward root, local, forward root @1, forward layer @1, \
backward layer @1, backward root @1
    >>> step.freed
    ((0,),)
    """

    stages: tuple[Pass | Local, ...]
    updates: Mapping[int, int | None] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "updates", dict(sorted(self.updates.items())))
        strange = [f"{stage!r} is neither a Pass nor a Local" for stage in self.stages if not _known(stage)]
        if strange or not self.stages:
            raise schedule_refusals.bad_program(strange or ["a step has at least one stage, a Pass or a Local"])

    @functools.cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Its passes, in order."""
        return tuple([stage for stage in self.stages if isinstance(stage, Pass)])

    @functools.cached_property
    def locals(self) -> tuple[Local, ...]:
        """Its code between passes, in order: op ``local`` number n runs the n-th."""
        return tuple([stage for stage in self.stages if isinstance(stage, Local)])

    @functools.cached_property
    def microbatches(self) -> tuple[Pass, ...]:
        """The pass of each microbatch. Microbatches are counted through the whole step."""
        return tuple([each for each in self.passes for _ in range(each.accumulate)])

    @functools.cached_property
    def computes(self) -> tuple[Op, ...]:
        """The compute ops of one microbatch of each pass, and of the code between passes, in order."""
        ops: list[Op] = []
        for stage, number in self._numbered():
            ops += [Op(LOCAL, "", number)] if isinstance(stage, Local) else stage.program.computes
        return tuple(ops)

    @functools.cached_property
    def steps(self) -> tuple[Op, ...]:
        """The compute ops of the step, in order."""
        ops: list[Op] = []
        for stage, number in self._numbered():
            if isinstance(stage, Local):
                ops.append(Op(LOCAL, "", number))
                continue
            once = stage.program.computes
            for microbatch, at in stage.sequence:
                op, number_of = once[at], number + microbatch
                ops.append(Op(op.kind, op.target, op.index, number_of) if number_of else op)
        return tuple(ops)

    def spread(self, values: Sequence[T]) -> list[T]:
        """One value for each of ``steps``, given one for each of ``computes``."""
        found: list[T] = []
        at = 0
        for stage in self.stages:
            if isinstance(stage, Local):
                found.append(values[at])
                at += 1
                continue
            found += [values[at + number] for _, number in stage.sequence]
            at += len(stage.program.computes)
        return found

    @functools.cached_property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Say where compute turns round: positions, among ``steps``, of the last call before, and the first call after.

        It does so between forward and backward, and from one microbatch to the next, whatever pass that one is of.
        """
        turns: list[tuple[int, int]] = []
        start, before = 0, -1  # before: the last call of the pass before
        for stage in self.stages:
            if isinstance(stage, Local):
                start += 1
                continue
            calls = [start + at for at, (_, number) in enumerate(stage.sequence) if stage.is_call(number)]
            if calls and before >= 0:
                turns.append((before, calls[0]))
            pairs = itertools.pairwise(calls if stage.program.backward else ())
            turns += [pair for pair in pairs if stage.turns_between(pair[0] - start, pair[1] - start)]
            start += len(stage.sequence)
            before = calls[-1] if calls else before
        return tuple(turns)

    @functools.cached_property
    def fillings(self) -> dict[int, Filling]:
        """Return what fills each gradient, by its group. It leaves out passes whose ``gradients`` are None."""
        found: dict[int, Filling] = {}
        for stage, number in self._numbered():
            if isinstance(stage, Pass):
                last = number + stage.accumulate - 1
                for read, group in (stage.gradients or {}).items():
                    found[group] = Filling(stage.program, read, number, last)
        return found

    @functools.cached_property
    def freed(self) -> tuple[tuple[int, ...], ...]:
        """For each local, the groups whose gradients nobody reads after it: no later local, and no update."""
        last = {group: number for number, local in enumerate(self.locals) for group in local.gradients}
        kept = set(self.updates.values())
        return tuple(
            tuple([group for group in dict.fromkeys(local.gradients) if last[group] == number and group not in kept])
            for number, local in enumerate(self.locals)
        )

    @functools.cached_property
    def reads(self) -> Mapping[str, tuple[int, ...]]:
        """Ids of the groups that each unit reads in any pass."""
        found: dict[str, dict[int, None]] = {}
        for each in self.passes:
            for unit, ids in each.program.reads.items():
                found.setdefault(unit, {}).update(dict.fromkeys(ids))
        return {unit: tuple(ids) for unit, ids in found.items()}

    @functools.cached_property
    def text(self) -> str:
        """Equal for equal steps."""
        return repr(self)

    def resolved(self, groups: Sequence[GroupInfo]) -> "StepProgram":
        """The same with the gradients of each pass written out."""
        if all([each.gradients is not None for each in self.passes]):
            return self
        trainable = [g for g, group in enumerate(groups) if group.trainable]
        own = [_own(each, trainable) for each in self.passes]
        last = max(number for number, each in enumerate(self.passes) if each.gradients is None)
        filled = {group for gradients in own for group in gradients.values()}
        own[last] |= {group: group for group in trainable if group not in filled}
        rest = iter(own)
        stages = [replace(stage, gradients=next(rest)) if isinstance(stage, Pass) else stage for stage in self.stages]
        return StepProgram(tuple(stages), self.updates)

    def forward_only(self) -> "StepProgram":
        """The same without backward, gradients and updates."""
        stages: list[Pass | Local] = []
        for stage in self.stages:
            if isinstance(stage, Local):
                stages.append(Local(makes=stage.makes))
            else:
                whole = not stage.program.backward  # then its order holds, and its edges do
                order, edges = (stage.order, stage.edges) if whole else ((), ())
                stages.append(Pass(replace(stage.program, backward=()), stage.accumulate, {}, order, edges))
        return StepProgram(tuple(stages), {})

    def _numbered(self) -> list[tuple[Pass | Local, int]]:
        """Each stage with its first microbatch, or its number among the locals."""
        found: list[tuple[Pass | Local, int]] = []
        microbatch = local = 0
        for stage in self.stages:
            if isinstance(stage, Local):
                found.append((stage, local))
                local += 1
            else:
                found.append((stage, microbatch))
                microbatch += stage.accumulate
        return found


def as_step_program(
    program: Program | StepProgram, groups: Sequence[GroupInfo], accumulate: int, train: bool
) -> StepProgram:
    """A step with the gradients of each pass written out. A program is a step of one pass, each group with its own."""
    if isinstance(program, StepProgram):
        return program.resolved(groups)
    own = {g: g for g, group in enumerate(groups) if group.trainable} if train else {}
    return StepProgram((Pass(program, accumulate, own),), dict(own))


def _disordered(each: Pass) -> list[str]:
    """List what is wrong with the order of a pass: each op of each microbatch runs once."""
    if not each.order:
        return []
    left = [set(range(len(each.program.computes))) for _ in range(each.accumulate)]
    for part in each.order:
        if not 0 <= part.microbatch < each.accumulate:
            return [f"order has microbatch {part.microbatch}, of {each.accumulate}"]
        ops = set(range(part.first, part.end))
        if not ops or not ops <= left[part.microbatch]:
            return [
                f"order has ops {part.first} to {part.end} of microbatch {part.microbatch}, not there or run before"
            ]
        left[part.microbatch] -= ops
    late = [f"order lacks op {min(ops)} of microbatch {m}" for m, ops in enumerate(left) if ops]
    return late[:1]


def _known(stage: object) -> bool:
    return isinstance(stage, Pass | Local)


def _own(each: Pass, trainable: Sequence[int]) -> dict[int, int]:
    """Return what a pass says of gradients, without those that no pass reads."""
    if each.gradients is not None:
        return dict(each.gradients)
    read = {group for ids in each.program.reads.values() for group in ids}
    return {group: group for group in trainable if group in read}
