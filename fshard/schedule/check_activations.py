"""Checking the moves of activations and of edges.

Activations leave once after their forward, and are there again before their backward. A message is sent once, after it
is complete, and there before it is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Pass

Key = tuple[str, int, int]
"""A unit, its call and the microbatch."""


@dataclass
class HostedProgress:
    """The progress of what one call keeps.

    Attributes:
        forward: the position of its forward among the compute ops of the step.
        backward: that of its backward.
        turn: that of the first backward of its microbatch.
        ahead: computes by which it may come back ahead of its backward.
        place: ``"device"``, ``"leaving"``, ``"host"``, ``"coming"`` or ``"back"``.
        at: the op that moved it last.
        since: the compute ops that were over when it began to leave.
    """

    forward: int
    backward: int
    turn: int
    ahead: int
    place: str = "device"
    at: int = 0
    since: int = 0

    @property
    def due(self) -> bool:
        """Tell whether it must leave: it does not come back before the first backward."""
        return self.backward - self.turn >= self.ahead


class ActivationCheck:
    """The part of an interpreter that follows activations to the host and back."""

    def __init__(self, schedule: Schedule) -> None:
        self.calls: dict[Key, HostedProgress] = {}
        self.leaving: dict[Key, HostedProgress] = {}
        start = microbatch = 0
        for stage in schedule.stages.stages:
            if isinstance(stage, Pass):
                self._note(stage, start, microbatch)
                microbatch += stage.accumulate
            start += len(stage.sequence) if isinstance(stage, Pass) else 1

    def take(self, at: int, op: Op, done: int) -> Iterator[str]:
        """List what is wrong with a move, where so many compute ops are over."""
        call = self.calls.get((op.target, op.index, op.microbatch))
        if call is None:
            yield f"no backward reads on the host what call {op.index} of {op.target} keeps"
        elif op.kind == "activation_offload":
            yield from self._leaves(op, call, done)
            call.place, call.at, call.since = "leaving", at, done
            self.leaving[op.target, op.index, op.microbatch] = call
        elif op.kind == "activation_fetch":
            yield from self._comes(op, call, done)
            call.place, call.at = "coming", at
        else:
            under_way, place = ("leaving", "host") if op.kind == "wait activation_offload" else ("coming", "back")
            if call.place != under_way:
                yield f"no {op.kind[5:]} of {op.target} is under way"
            call.place = place
            self.leaving.pop((op.target, op.index, op.microbatch), None)

    def compute(self, op: Op, done: int) -> Iterator[str]:
        """List what is wrong if a compute op runs now."""
        for (unit, _, _), call in self.leaving.items():
            if done > call.since:  # the compute that follows its forward is over
                yield f"activation_offload of {unit} must be waited for: a compute has run since op {call.at}"
        own = self.calls.get((op.target, op.index, op.microbatch)) if op.kind == "backward" else None
        if own is not None and own.place != "back" and (own.due or own.place != "device"):
            yield f"{op.target} reads what it has kept, which is {_WHERE[own.place]}"

    def leftover(self) -> tuple[int, str] | None:
        """The op that is to blame, and how, for a move that is missing at the end; None if none is."""
        for (unit, _, _), call in self.calls.items():
            if call.place not in ("device", "back"):
                return call.at, f"what {unit} keeps is moved here, and never read"
        return None

    def _leaves(self, op: Op, call: HostedProgress, done: int) -> Iterator[str]:
        if not call.due:
            yield f"what {op.target} keeps is read {call.backward - call.turn} computes after the first backward"
        if call.place != "device":
            yield f"what {op.target} keeps was moved at op {call.at}"
        if done <= call.forward:
            yield f"what {op.target} keeps leaves before its forward"
        for unit, _, _ in self.leaving:
            yield f"activation_offload of {unit} is under way; one at a time may be"

    def _comes(self, op: Op, call: HostedProgress, done: int) -> Iterator[str]:
        if call.place != "host":
            yield f"what {op.target} keeps is {_WHERE[call.place]}"
        if done < call.turn:
            yield f"what {op.target} keeps comes back before the backward begins"
        if call.backward - done > call.ahead:
            yield f"{op.target} is differentiated {call.backward - done} computes ahead; its limit is {call.ahead}"

    def _note(self, each: Pass, start: int, microbatch: int) -> None:
        if not each.program.hosted:
            return
        computes, places = each.program.computes, {place: start + at for at, place in enumerate(each.sequence)}
        first = next((number for number, op in enumerate(computes) if op.kind == "backward"), 0)
        for number in range(each.accumulate):
            at = {(op.kind, op.target, op.index): places[number, place] for place, op in enumerate(computes)}
            for call in each.program.backward:
                ahead = each.program.hosted.get(call.unit)
                if ahead is not None:
                    forward, backward = (at[kind, call.unit, call.index] for kind in ("forward", "backward"))
                    key = call.unit, call.index, microbatch + number
                    self.calls[key] = HostedProgress(forward, backward, places[number, first], ahead)


_WHERE = {
    "device": "on the device",
    "leaving": "on its way to the host",
    "host": "on the host",
    "coming": "on its way back",
    "back": "back already",
}


@dataclass
class EdgeProgress:
    """The messages of one edge.

    Attributes:
        sends: whether this rank sends them.
        due: by microbatch, the compute op after which the message is complete, or before which it is read.
        started: the microbatches whose message was started, and at which op.
        over: those whose message was waited for.
        most: the messages that may be under way.
    """

    sends: bool
    due: dict[int, int]
    started: dict[int, int]
    over: set[int]
    most: int = 1


class EdgeCheck:
    """The part of an interpreter that follows the messages of edges."""

    def __init__(self, schedule: Schedule) -> None:
        self.edges: dict[str, EdgeProgress] = {}
        self.readers: dict[int, list[tuple[str, int]]] = {}  # what each compute op receives
        start = microbatch = 0
        for stage in schedule.stages.stages:
            if isinstance(stage, Pass):
                self._note(schedule, stage, start, microbatch)
                microbatch += stage.accumulate
            start += len(stage.sequence) if isinstance(stage, Pass) else 1

    def take(self, at: int, op: Op, done: int) -> Iterator[str]:
        """List what is wrong with an op on an edge, where so many compute ops are over."""
        edge, number = self.edges.get(op.target), op.microbatch
        if edge is None or op.kind.removeprefix("wait ") != ("send" if edge.sends else "receive"):
            yield f"{op.target} has no {op.kind.removeprefix('wait ')}"
        elif number not in edge.due:
            yield f"{op.target} has no message of microbatch {number}"
        elif op.kind.startswith("wait "):
            if number not in edge.started or number in edge.over:
                yield f"no {op.kind[5:]} of {op.target} of microbatch {number} is under way"
            edge.over.add(number)
        else:
            if number in edge.started:
                yield f"{op.kind} of {op.target} of microbatch {number} was started at op {edge.started[number]}"
            if len(waiting := [m for m in edge.started if m not in edge.over]) >= edge.most:
                yield f"{op.kind} of {op.target} of microbatch {waiting[0]} is under way; the edge allows {edge.most}"
            if edge.sends and done <= edge.due[number]:
                yield f"{op.target} of microbatch {number} is sent before it is complete"
            edge.started[number] = at

    def read(self, position: int) -> Iterator[str]:
        """List what a compute op reads that has not arrived."""
        for name, microbatch in self.readers.get(position, ()):
            if microbatch not in self.edges[name].over:
                yield f"{name} of microbatch {microbatch} is read before it has arrived"

    def leftover(self) -> tuple[int, str] | None:
        """The op that is to blame, and how, for a message that is missing at the end; None if none is."""
        for name, edge in self.edges.items():
            for microbatch in edge.due:
                if microbatch not in edge.over:
                    at = edge.started.get(microbatch, -1)
                    what = "is started here and never waited for" if at >= 0 else "is missing"
                    return max(
                        at, 0
                    ), f"the {'send' if edge.sends else 'receive'} of {name} of microbatch {microbatch} {what}"
        return None

    def _note(self, schedule: Schedule, each: Pass, start: int, microbatch: int) -> None:
        places = {place: start + at for at, place in enumerate(each.sequence)}
        for group, at, most in each.edges:
            info = schedule.groups[group]
            due = {microbatch + m: places[m, at] for m in range(each.accumulate)}
            edge = self.edges[info.name] = EdgeProgress(info.transfer("send") is not None, due, {}, set(), most)
            for number, position in due.items() if not edge.sends else ():
                self.readers.setdefault(position, []).append((info.name, number))
