"""The words of a schedule: ops, and the program and groups that they speak of.

=========  =======  =====================================================================================
op         target   meaning
=========  =======  =====================================================================================
agree               ranks compare the schedule's hash and the signature of the batch; the first op
update     group    apply the optimizer update to this rank's shard: the one that the previous step left
                    (deferred), or this step's own (in_backward)
gather     group    issue the all-gather into the group's slot of the arena
wait       group    the gather is over: compute may read the slot
free       group    the slot's range may be reused
forward    unit     a call of a unit runs; ``root`` is the code outside of units: the loss function is entered
backward   unit     the gradient of a call is computed; ``root``: everything outside of units is over, the
                    outer gradient too where there is one
reduce     group    issue the reduction of the group's flat gradient
collect    group    the reduction is over: its result is added to this rank's gradient shard
sum        group    issue the sum of the gradient shard over replicas, once a step, beside what follows
total      group    the sum over replicas is over
spread     group    send the range that this rank has updated to the ranks that hold the same shard
join       group    the ranges of all of them are there: the shard is up to date
offload   group    send the complete gradient shard to host memory, where the update runs
stored    group    it is there: the memory that it had on the device is free
commit              the norm, and the vote of all ranks; the last op of a train step
=========  =======  =====================================================================================
"""

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fshard import errors

T = TypeVar("T", bound=Hashable)

ROOT = "root"
"""The unit that stands for the code outside of units."""

UNIT_KINDS = frozenset(("forward", "backward"))
GROUP_KINDS = frozenset(
    ("update", "gather", "wait", "free", "reduce", "collect", "sum", "total", "spread", "join", "offload", "stored")
)
STEP_KINDS = frozenset(("agree", "commit"))
KINDS = UNIT_KINDS | GROUP_KINDS | STEP_KINDS

MICROBATCH_KINDS = UNIT_KINDS | {"reduce", "collect"}
"""Ops that belong to one microbatch. A gather may serve several, so it and the others carry 0."""


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a schedule.

    Args:
        kind: one of ``KINDS``.
        target: a unit's name for forward and backward, a group's for the others, empty for agree and commit.
        index: for forward and backward, which call of the unit in one pass of the program.
        microbatch: for forward, backward, reduce and collect, which microbatch of the step.

    >>> print(Op("forward", "blocks.2", microbatch=1))
    forward blocks.2 @1
    """

    kind: str
    target: str = ""
    index: int = 0
    microbatch: int = 0

    def __str__(self) -> str:
        call = f" #{self.index}" if self.index else ""
        microbatch = f" @{self.microbatch}" if self.microbatch else ""
        return f"{self.kind} {self.target}".rstrip() + call + microbatch


@dataclass(frozen=True, slots=True)
class Call:
    """The ``index``-th call, from 0, of a unit in one pass of the program."""

    unit: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.unit} #{self.index}" if self.index else self.unit


@dataclass(frozen=True)
class Program:
    """What one run of the loss function does, in order.

    Args:
        forward: the calls of units.
        backward: those that receive gradients, in the order in which their gradients are computed.
        reads: ids of the groups that each unit reads. ``reads["root"]`` are those read outside of units; a
            missing entry means none.

    Raises:
        PlanError: a call is misnumbered, unknown, repeated, or of a unit that ``reads`` lacks.
    """

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    reads: Mapping[str, tuple[int, ...]] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward", tuple(self.forward))
        object.__setattr__(self, "backward", tuple(self.backward))
        problems = [*_call_problems(self.forward, self.backward, self.reads), *_read_problems(self.reads)]
        if problems:
            raise errors.bad_program(problems)
        # One order whatever the given dict has: equal programs have equal texts.
        called = dict.fromkeys(call.unit for call in self.forward)
        names = dict.fromkeys((ROOT, *called, *sorted(self.reads)))
        object.__setattr__(self, "reads", {name: tuple(self.reads.get(name, ())) for name in names})

    @functools.cached_property
    def text(self) -> str:
        """Equal for equal programs. It is asked for in every step, and made once."""
        return repr(self)


@dataclass(frozen=True)
class GroupInfo:
    """What a schedule must know of a group. Sizes are bytes.

    Args:
        name: the name that ops carry.
        full_bytes: the gathered buffer.
        shard_bytes: what one rank keeps of it.
        grad_bytes: the full flat gradient; 0 for a frozen group.
        stage_bytes: further memory that a reduction needs while in flight.
        gathered: False for a group that compute reads where it lies: it is not gathered, waited for or freed.
        reduced: False for a group whose gradient needs no communication: it is not reduced or collected.
        trainable: whether it has gradients and updates.
        gather_sent: what this rank sends in one gather.
        reduce_sent: what it sends in one reduction over the ranks that hold its shards. 0 for a group whose
            gradients are only added up on each rank, until replicas are summed.
        sum_sent: what it sends once a step, after the last microbatch, to add its shard up over replicas. 0 for
            a group without replicas.
        spread_sent: what it sends after the update of its part of a shard that it has in common with others. 0
            where every rank updates all that it keeps.
        sum_bytes: further memory that a sum over replicas needs while in flight.
        own_bytes: this rank's part of the summed gradient, where that is less than its shard of the gradient; else 0.
        over: the mesh axes, joined by ``+``, of gather, reduce, sum and spread. Transfers over the same axes
            share a link.
        offload_sent: what it sends to host memory once a step, for an update there. 0 where updates run on the device.
        visit_bytes: further device memory that its update needs, for what comes out of host memory.

    Raises:
        PlanError: a size is negative, or the name is empty.
    """

    name: str
    full_bytes: int
    shard_bytes: int
    grad_bytes: int
    stage_bytes: int
    gathered: bool
    reduced: bool
    trainable: bool
    gather_sent: int = 0
    reduce_sent: int = 0
    sum_sent: int = 0
    spread_sent: int = 0
    sum_bytes: int = 0
    own_bytes: int = 0
    over: tuple[str, str, str, str] = ("", "", "", "")
    offload_sent: int = 0
    visit_bytes: int = 0

    @property
    def lands(self) -> bool:
        """Whether the first sum of its gradient is made in the staging, so that the shard need not be there yet.

        It is where what travels is in the dtype of the shard: staging then has room for a chunk.
        """
        return self.stage_bytes > 0 and self.shard_bytes == self.grad_bytes - self.reduce_sent

    def __post_init__(self) -> None:
        held = (self.full_bytes, self.shard_bytes, self.grad_bytes, self.stage_bytes, self.sum_bytes, self.own_bytes)
        sizes = (
            *held,
            self.offload_sent,
            self.visit_bytes,
            self.gather_sent,
            self.reduce_sent,
            self.sum_sent,
            self.spread_sent,
        )
        if not self.name or min(sizes) < 0:
            raise errors.bad_program([f"group {self.name!r}: {sizes} bytes; a name and sizes >= 0 are needed"])

    @property
    def summed(self) -> bool:
        """Whether its gradient is added up over replicas, once a step."""
        return self.trainable and self.reduced and self.sum_sent > 0

    @property
    def local(self) -> bool:
        """Whether its reductions send nothing, so that each is over at once."""
        return self.reduced and not self.reduce_sent and (self.summed or self.offloaded)

    @property
    def offloaded(self) -> bool:
        """Whether its gradient goes to host memory when it is complete."""
        return self.trainable and self.offload_sent > 0

    @property
    def spread(self) -> bool:
        """Whether its updated ranges are sent to other ranks."""
        return self.trainable and self.spread_sent > 0


def checked(groups: Sequence[GroupInfo], program: Program, accumulate: int) -> None:
    """Raise PlanError if the parts of a schedule do not belong together."""
    problems = []
    names = [group.name for group in groups]
    problems += [f"{names.count(name)} groups have the name {name!r}" for name in _repeated(names)]
    for unit, ids in program.reads.items():
        beyond = [i for i in ids if i >= len(names)]
        problems += [f"unit {unit!r} reads group {i}; there are {len(names)} groups" for i in beyond]
    if type(accumulate) is not int or accumulate < 1:
        problems.append(f"accumulate={accumulate!r} is not an int of at least 1")
    if problems:
        raise errors.bad_program(problems)


def _call_problems(
    forward: Sequence[Call], backward: Sequence[Call], reads: Mapping[str, Sequence[int]]
) -> Iterable[str]:
    counts: dict[str, int] = {}
    for call in forward:
        expected = counts.get(call.unit, 0)
        if call.index != expected:
            yield f"forward holds '{call}' where call #{expected} of that unit is due"
        counts[call.unit] = expected + 1
    for unit in counts:
        if unit == ROOT:
            yield f"a unit is named {ROOT!r}, the name of the code outside of units"
        elif unit not in reads:
            yield f"unit {unit!r} is called, but reads says nothing about it"
        elif not unit:
            yield "a unit has an empty name"
    known = set(forward)
    yield from (f"backward holds '{call}', forward does not" for call in backward if call not in known)
    yield from (f"backward holds '{call}' twice" for call in _repeated(backward))


def _read_problems(reads: Mapping[str, Sequence[int]]) -> Iterable[str]:
    for unit, ids in reads.items():
        yield from (f"unit {unit!r} reads group {i} twice" for i in _repeated(ids))
        yield from (f"unit {unit!r} reads group {i}, which is negative" for i in ids if i < 0)


def _repeated(items: Sequence[T]) -> list[T]:
    seen: set[T] = set()
    again: dict[T, None] = {}
    for item in items:
        if item in seen:
            again[item] = None
        seen.add(item)
    return list(again)
