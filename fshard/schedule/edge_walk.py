"""Placing sends and receives while a schedule is built.

A value is sent right after the compute op that completes it. The oldest message on the same edge is waited for then,
where there would be more under way than the edge allows. It is received before the first op that reads it; the receive
is posted one portion ahead, so that it travels while this rank computes another microbatch.
"""

from collections import defaultdict, deque

from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Pass

Message = tuple[int, int]
"""The group of an edge, and the microbatch."""


class EdgeWalk:
    """Emits the sends and receives of a step's edges; without edges it emits nothing."""

    def __init__(self, bare: Schedule, ops: list[Op]) -> None:
        self.groups, self.ops = bare.groups, ops
        self.posts: dict[int, list[Message]] = defaultdict(list)  # by the portion during which they travel
        self.waits: dict[int, list[Message]] = defaultdict(list)  # by the compute op that reads them
        self.sends: dict[int, list[Message]] = defaultdict(list)  # by the compute op that completes them
        self.starts: dict[int, int] = {}  # the portion that begins at a compute op
        self.most: dict[int, int] = {}  # messages under way at most, by group
        self.under_way: dict[int, deque[int]] = defaultdict(deque)  # their microbatches, the oldest first
        start = microbatch = 0
        for stage in bare.stages.stages:
            if isinstance(stage, Pass):
                self._place(stage, start, microbatch)
                start, microbatch = start + len(stage.sequence), microbatch + stage.accumulate
            else:
                start += 1

    def first(self) -> None:
        """Post what the first portion receives."""
        self._post(-1)

    def before(self, k: int) -> None:
        """Compute ``k`` is next: wait for what it reads, and post what the next portion reads."""
        for message in self.waits.get(k, ()):
            self._emit("wait receive", message)
        if k in self.starts:
            self._post(self.starts[k])

    def after(self, k: int) -> None:
        """Compute ``k`` is over: send what it has completed."""
        for group, microbatch in self.sends.get(k, ()):
            while len(self.under_way[group]) >= self.most[group]:
                self._sent(group)
            self._emit("send", (group, microbatch))
            self.under_way[group].append(microbatch)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for group, messages in self.under_way.items():
            while messages:
                self._sent(group)

    def _place(self, each: Pass, start: int, microbatch: int) -> None:
        """Write down when the edges of a pass are used."""
        at, begun = start, len(self.starts)
        for number, part in enumerate(each.portions if each.edges else ()):
            self.starts[at] = begun + number
            for group, op, most in each.edges:
                self.most[group] = most
                if not part.first <= op < part.end:
                    continue
                place, message = at + op - part.first, (group, microbatch + part.microbatch)
                if self.groups[group].transfer("send") is not None:
                    self.sends[place].append(message)
                else:
                    self.waits[place].append(message)
                    self.posts[begun + number - 1].append(message)
            at += part.end - part.first

    def _post(self, portion: int) -> None:
        for message in self.posts.get(portion, ()):
            self._emit("receive", message)

    def _sent(self, group: int) -> None:
        """Wait for the oldest message."""
        self._emit("wait send", (group, self.under_way[group].popleft()))

    def _emit(self, kind: str, message: Message) -> None:
        group, microbatch = message
        self.ops.append(Op(kind, self.groups[group].name, 0, microbatch))
