"""Checking what a rank sends and receives: each message once, after it is complete, and there before it is read."""

from collections.abc import Iterator
from dataclasses import dataclass

from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Pass


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
                    return max(at, 0), f"the {_word(edge)} of {name} of microbatch {microbatch} {what}"
        return None

    def _note(self, schedule: Schedule, each: Pass, start: int, microbatch: int) -> None:
        places = {place: start + at for at, place in enumerate(each.sequence)}
        for group, at, most in each.edges:
            info = schedule.groups[group]
            due = {microbatch + m: places[m, at] for m in range(each.accumulate)}
            edge = self.edges[info.name] = EdgeProgress(info.transfer("send") is not None, due, {}, set(), most)
            for number, position in due.items() if not edge.sends else ():
                self.readers.setdefault(position, []).append((info.name, number))


def _word(edge: EdgeProgress) -> str:
    return "send" if edge.sends else "receive"
