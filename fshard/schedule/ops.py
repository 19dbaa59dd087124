"""The words of a schedule: ops, and the program and groups that they speak of.

==============  =======  =================================================================================
op              target   meaning
==============  =======  =================================================================================
handshake                ranks compare the schedule's hash and the signature of the batch; the first op
update          group    apply the optimizer update to this rank's shard: the one that the previous step left
                         (deferred), or this step's own (in_backward)
wait update     group    the update, which runs on a stream of its own (beside), is over: its gradient can go
free            group    the memory of the gathered parameters may be reused
reshard         group    the same, but this rank keeps its secondary shard of them, for gathers over fewer axes
forward         unit     a call of a unit runs; ``root`` is the code outside of units: the loss function is entered
backward        unit     the gradient of a call is computed; ``root``: everything outside of units is over, the
                         outer gradient too where there is one
weight          unit     the gradients of a call's leaves are computed, where its backward was for its inputs alone
local                    code of the step function between passes runs on this rank's shards
consensus                losses, norms and failures of all ranks; the last op of a train step
==============  =======  =================================================================================

And two ops for each kind of transfer (``transfers.py``): its name starts it, ``wait`` and its name ends it. The target
is a group; or a unit, for what a call of it keeps for its backward.
"""

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from fshard.schedule import schedule_refusals
from fshard.schedule.transfers import KINDS, PeriodicTransfer, Transfer

T = TypeVar("T", bound=Hashable)

ROOT = "root"
"""The unit that stands for the code outside of units."""

LOCAL = "local"
"""The kind of ops that run code between passes."""

UNIT_KINDS = frozenset(("forward", "backward", "weight"))
COMPUTE_KINDS = UNIT_KINDS | {LOCAL}
STEP_KINDS = frozenset(("handshake", "consensus"))
UPDATED = "wait update"
"""The kind of ops that wait for updates beside compute."""

GROUP_KINDS = frozenset(("update", UPDATED, "free", "reshard"))
"""Ops on a group besides those of transfers."""


def call_kinds() -> frozenset[str]:
    """The kinds of ops on one call of a unit: its computes, and the moves of what it keeps."""
    moved = [row for row in KINDS.values() if row.stage == "activation"]
    return UNIT_KINDS | {word for row in moved for word in (row.name, row.wait)}


def op_kinds() -> frozenset[str]:
    """The kinds of all ops."""
    return COMPUTE_KINDS | STEP_KINDS | GROUP_KINDS | {word for row in KINDS.values() for word in (row.name, row.wait)}


def microbatch_kinds() -> frozenset[str]:
    """The kinds of ops that belong to one microbatch. An all-gather may serve several, so it and the others carry 0."""
    return UNIT_KINDS | {word for row in KINDS.values() if row.each_microbatch for word in (row.name, row.wait)}


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a schedule.

    Args:
        kind: one of ``op_kinds()``.
        target: a unit's name for forward and backward, a group's for the others, empty for handshake, consensus and
            local.
        index: for forward, backward and moves of activations, which call of the unit in one pass of the program; which
            local of the step.
        microbatch: for ops of one microbatch (``microbatch_kinds()``), which microbatch of the step.

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
    """Calls of units in one run of the loss function, in order.

    Args:
        forward: the calls of units.
        backward: those that receive gradients, in the order in which their gradients are computed.
        reads: ids of the groups that each unit reads. ``reads["root"]`` are those read outside of units; a
            missing entry means none.
        parted: whether backwards compute the gradients of inputs alone, and ops ``weight`` those of leaves; ``"taped"``
            if these read no parameters.
        hosted: the units that keep on the host what their backward reads, and how many computes ahead of it that
            comes back.

    Raises:
        PlanError: a call is misnumbered, unknown, repeated, or of a unit that ``reads`` lacks; a hosted unit is not
            called, or comes back less than one compute ahead.
    """

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    reads: Mapping[str, tuple[int, ...]] = field(hash=False)
    parted: bool | Literal["taped"] = False
    hosted: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward", tuple(self.forward))
        object.__setattr__(self, "backward", tuple(self.backward))
        object.__setattr__(self, "hosted", dict(sorted(self.hosted.items())))
        problems = [*_problems(self.forward, self.backward, self.reads), *_misplaced(self.forward, self.hosted)]
        if problems:
            raise schedule_refusals.bad_program(problems)
        # One order whatever the given dict has: equal programs have equal texts.
        called = dict.fromkeys(call.unit for call in self.forward)
        names = dict.fromkeys((ROOT, *called, *sorted(self.reads)))
        object.__setattr__(self, "reads", {name: tuple(self.reads.get(name, ())) for name in names})

    @functools.cached_property
    def computes(self) -> tuple[Op, ...]:
        """The compute ops of one microbatch, in order."""
        forward = [Op("forward", call.unit, call.index) for call in self.forward]
        backward = [Op("backward", call.unit, call.index) for call in self.backward]
        weight = [Op("weight", call.unit, call.index) for call in self.backward if self.parted]
        return Op("forward", ROOT), *forward, *backward, *weight, Op("backward", ROOT)

    def needs(self, op: Op) -> tuple[int, ...]:
        """The groups that a compute op reads."""
        return () if op.kind == "weight" and self.parted == "taped" else self.reads[op.target]

    def fills(self, op: Op) -> tuple[int, ...]:
        """The groups whose gradients a compute op fills."""
        kind = "weight" if self.parted and op.target != ROOT else "backward"
        return self.reads[op.target] if op.kind == kind else ()

    def filled(self, group: int) -> tuple[int, int]:
        """The positions, among ``computes``, of the first and the last op that fills a group's gradient.

        A group that no op fills is complete, with zeros, at the end: ranks whose batches lead to different gradients
        must still issue the same reductions.
        """
        return self._filled.get(group, (len(self.computes), len(self.computes) - 1))

    @functools.cached_property
    def _filled(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for at, op in enumerate(self.computes):
            for group in self.fills(op):
                found[group] = found.get(group, (at, at))[0], at
        return found

    @functools.cached_property
    def text(self) -> str:
        """Equal for equal programs. It is asked for in every step, and made once."""
        return repr(self)

    @functools.cached_property
    def bare(self) -> "Program":
        """The same with all activations on the device."""
        return replace(self, hosted={}) if self.hosted else self


@dataclass(frozen=True)
class GroupInfo:
    """Facts of a group that a schedule must know. Sizes are bytes.

    Args:
        name: the name that ops carry.
        full_bytes: the gathered parameters.
        shard_bytes: what one rank keeps of the gradient.
        grad_bytes: the full flat gradient; 0 for a frozen group.
        trainable: whether it has a gradient in this step.
        transfers: its path, in the order of ``transfers.KINDS``. Compute reads a group that is not all-gathered where
            it lies; the gradient of one that is not reduce-scattered needs no communication.
        own_bytes: this rank's part of the summed gradient, where that is less than its shard of the gradient; else 0.
        update_bytes: further device memory that its update needs: for what comes out of host memory, and for what the
            optimizer makes for itself.
        second_bytes: this rank's secondary shard of the gathered parameters; 0 if it keeps none.
        left_bytes: what rounding leaves out of its sum over replicas, which waits for the update; 0 if that is lost.
        cast_bytes: the copy of this rank's shard in the dtype or format that is gathered or read; 0 if it has none.
        copy_bytes: a copy of its shard and optimizer state; 0 in a step that reuses the memory of the state. Ranks may
            differ in it, so it is not in the text of a schedule, nor compared.

    Raises:
        PlanError: a size is negative, the name is empty, or the path is out of order.

    >>> GroupInfo("layer", 64, 32, 64, True, (Transfer("all_gather", "state", "param", sent=32),)).gathered
    True
    """

    name: str
    full_bytes: int
    shard_bytes: int
    grad_bytes: int
    trainable: bool
    transfers: tuple[Transfer, ...] = ()
    own_bytes: int = 0
    update_bytes: int = 0
    second_bytes: int = 0
    left_bytes: int = 0
    cast_bytes: int = 0
    copy_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transfers", tuple(self.transfers))
        sizes = (self.full_bytes, self.shard_bytes, self.grad_bytes, self.own_bytes, self.update_bytes)
        if not self.name or min(*sizes, self.second_bytes, self.left_bytes, self.cast_bytes, self.copy_bytes) < 0:
            raise schedule_refusals.bad_program(
                [f"group {self.name!r}: {sizes} bytes; a name and sizes >= 0 are needed"]
            )
        order = [transfer.kind for transfer in self.transfers]
        if order != [kind for kind in KINDS if kind in order]:
            raise schedule_refusals.bad_program(
                [f"group {self.name!r}: {', '.join(order)}; the order is {', '.join(KINDS)}"]
            )

    def transfer(self, kind: str) -> Transfer | None:
        """Its transfer of a kind; None if it has none."""
        return next((transfer for transfer in self.transfers if transfer.kind == kind), None)

    def at(self, stage: str) -> tuple[Transfer, ...]:
        """Its transfers of a stage, in order. A frozen group has none of ``"gradient"``."""
        if stage == "gradient" and not self.trainable:
            return ()
        return tuple([transfer for transfer in self.transfers if transfer.row.stage == stage])

    @property
    def exchanges(self) -> tuple[PeriodicTransfer, ...]:
        """Its transfers between steps."""
        return tuple([transfer for transfer in self.transfers if isinstance(transfer, PeriodicTransfer)])

    @property
    def gathered(self) -> bool:
        """Tell whether it is gathered for compute, and freed after it."""
        return any([transfer.row.stage == "read" for transfer in self.transfers])

    @property
    def reduced(self) -> bool:
        """Tell whether its gradient needs communication."""
        return bool(self.at("gradient"))

    def size(self, item: str) -> int:
        """The bytes of an item of memory, such as ``"param"`` or ``"shard"``."""
        return {
            "param": self.full_bytes,
            "second": self.second_bytes,
            "grad": self.grad_bytes,
            "shard": self.shard_bytes,
            "own": self.own_bytes,
            "left": self.left_bytes,
            "cast": self.cast_bytes,
            "copy": self.copy_bytes,
        }[item]


def _problems(forward: Sequence[Call], backward: Sequence[Call], reads: Mapping[str, Sequence[int]]) -> Iterable[str]:
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
    for unit, ids in reads.items():
        yield from (f"unit {unit!r} reads group {i} twice" for i in _repeated(ids))
        yield from (f"unit {unit!r} reads group {i}, which is negative" for i in ids if i < 0)


def _misplaced(forward: Sequence[Call], hosted: Mapping[str, int]) -> Iterable[str]:
    called = {call.unit for call in forward}
    for unit, ahead in hosted.items():
        if unit not in called:
            yield f"unit {unit!r} keeps its activations on the host, and is not called"
        if type(ahead) is not int or ahead < 1:
            yield f"the activations of unit {unit!r} come back {ahead!r} computes ahead; at least 1 is needed"


def _repeated(items: Sequence[T]) -> list[T]:
    return [item for item, count in Counter(items).items() if count > 1]
