"""Placing the moves of activations that wait on the host for their backward.

What a call keeps leaves right after its forward. The copy has the compute that follows to end in, and its source is
freed then, so at most what one call keeps is under way. It comes back a number of computes ahead of its backward, and
never before the backward has begun: what would come back sooner, that of the calls whose backwards are the first, stays
on the device.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fshard.schedule.ops import Call, Op, Program
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Pass
from fshard.schedule.transfers import KINDS

OFFLOAD, FETCH = KINDS["activation_offload"], KINDS["activation_fetch"]


class HostedCall(NamedTuple):
    """A call that keeps on the host what its backward reads; places are numbers among the computes of its program.

    Attributes:
        forward: the place of its forward.
        fetch: the compute before which its activations start to come back.
        backward: the place of its backward.
    """

    call: Call
    forward: int
    fetch: int
    backward: int


def hosted_calls(program: Program) -> list[HostedCall]:
    """The calls whose activations leave the device, in the order of their forwards.

    >>> calls = Call("a"), Call("b")
    >>> hosted_calls(Program(calls, calls[::-1], {"a": (), "b": ()}, hosted={"a": 1, "b": 1}))
    [HostedCall(call=Call(unit='a', index=0), forward=1, fetch=3, backward=4)]
    """
    turn = 1 + len(program.forward)
    backward = {call: turn + number for number, call in enumerate(program.backward)}
    found = []
    for number, call in enumerate(program.forward if program.hosted else (), 1):
        place, ahead = backward.get(call, 0), program.hosted.get(call.unit, 0)
        if ahead and place - ahead >= turn:
            found.append(HostedCall(call, number, place - ahead, place))
    return found


def called(program: Program) -> list[tuple[str, int]]:
    """The units of hosted calls, and which calls of them."""
    return [(each.call.unit, each.call.index) for each in hosted_calls(program)]


class Moves(NamedTuple):
    """Ops of one microbatch that stand before and after its computes, by the number of these."""

    before: Mapping[int, Sequence[Op]]
    after: Mapping[int, Sequence[Op]]


def moves_of(program: Program) -> Moves:
    """The moves of activations in one microbatch of a program."""
    before, after = defaultdict[int, list[Op]](list), defaultdict[int, list[Op]](list)
    waits = defaultdict[int, list[Op]](list)
    for call, forward, fetch, backward in hosted_calls(program):
        after[forward].append(Op(OFFLOAD.name, call.unit, call.index))
        before[fetch].append(Op(FETCH.name, call.unit, call.index))
        waits[backward].append(Op(FETCH.wait, call.unit, call.index))
        over = Op(OFFLOAD.wait, call.unit, call.index)
        if forward < len(program.forward):
            after[forward + 1].insert(0, over)
        else:
            after[forward].append(over)
    for place, ops in waits.items():
        before[place] += ops  # behind those that start there
    return Moves(before, after)


class ActivationWalk:
    """Emits the moves of activations of a step; without hosted units it emits nothing."""

    def __init__(self, bare: Schedule, ops: list[Op]) -> None:
        self.ops = ops
        self.moves: dict[int, tuple[Moves, int, int]] = {}  # by compute: the moves, its number, its microbatch
        start = microbatch = 0
        for stage in bare.stages.stages:
            if not isinstance(stage, Pass):
                start += 1
                continue
            if stage.program.hosted:
                moves = moves_of(stage.program)
                for place, (number, at) in enumerate(stage.sequence, start):
                    self.moves[place] = moves, at, microbatch + number
            start, microbatch = start + len(stage.sequence), microbatch + stage.accumulate

    def before(self, k: int) -> None:
        """Compute ``k`` is next."""
        self._emit(k, 0)

    def after(self, k: int) -> None:
        """Compute ``k`` is over."""
        self._emit(k, 1)

    def _emit(self, k: int, side: int) -> None:
        if k in self.moves:
            moves, at, microbatch = self.moves[k]
            self.ops += [Op(op.kind, op.target, op.index, microbatch) for op in moves[side].get(at, ())]
