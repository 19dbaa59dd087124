"""Placing sends and receives while a schedule is built.

A value is sent right after the compute op that completes it. If as many messages of its edge are on their way as may
be, the oldest is waited for then. A value is received before the first op that reads it; the receive is posted one
portion ahead, so that it travels while this rank computes another microbatch.
"""

from collections import defaultdict

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
        self.ahead: dict[int, int] = {}
        self.under_way: dict[int, list[int]] = defaultdict(list)  # microbatches by group, the oldest first
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
            self._sent(group, self.ahead[group])
            self._emit("send", (group, microbatch))
            self.under_way[group].append(microbatch)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for group in list(self.under_way):
            self._sent(group, 1)

    def _place(self, each: Pass, start: int, microbatch: int) -> None:
        """Write down when the edges of a pass are used."""
        at, begun = start, len(self.starts)
        for number, part in enumerate(each.portions if each.edges else ()):
            self.starts[at] = begun + number
            for group, op, ahead in each.edges:
                self.ahead[group] = ahead
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

    def _sent(self, group: int, ahead: int) -> None:
        """Wait for the oldest messages of an edge until fewer than this many are on their way."""
        while len(self.under_way[group]) >= ahead:
            self._emit("wait send", (group, self.under_way[group].pop(0)))

    def _emit(self, kind: str, message: Message) -> None:
        group, microbatch = message
        self.ops.append(Op(kind, self.groups[group].name, 0, microbatch))
