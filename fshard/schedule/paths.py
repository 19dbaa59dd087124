"""Walking the paths of gradients, and what follows their updates, while a schedule is built.

One rule: when a transfer of a path is over, the next one of the group starts at once, and it is waited for as late as
can be, which is when another of its kind would exceed the limit, or at the end of the step. Two rules that were found
by measurement change that: ``_over_at_once`` and ``_hurried``.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import KINDS, Transfer


class Updates:
    """Emits the updates of groups, and the transfers that each makes necessary: ``sharing`` are those under way."""

    def __init__(self, bare: Schedule, ops: list[Op]) -> None:
        self.groups, self.ops = bare.groups, ops
        self.deferred = bare.train and bare.policy.update == "deferred"
        self.after = [group.at("updated") for group in bare.groups]
        self.updated: set[int] = set()
        self.sharing: dict[int, tuple[Transfer, ...]] = {}

    def partial_first(self, order: Sequence[int]) -> None:
        """Update partially updated groups first, in the order of use.

        What they have changed is then on its way to other ranks while the first ones are gathered and compute.
        """
        for g in order:
            if self.after[g]:
                self.first(g)

    def first(self, group: int) -> None:
        """Update before a group is used, where the update is the one that the step before has left."""
        if self.deferred and self.groups[group].trainable and group not in self.updated:
            self.updated.add(group)
            self.issue(group)

    def issue(self, group: int) -> None:
        """Update, and begin to send what this rank has changed."""
        self._emit("update", group)
        if self.after[group]:
            self._emit(self.after[group][0].kind, group)
            self.sharing[group] = self.after[group]

    def share(self, group: int) -> None:
        """See that what other ranks updated of a group is there."""
        for number, transfer in enumerate(self.sharing.pop(group, ())):
            if number:
                self._emit(transfer.kind, group)
            self._emit(transfer.row.wait, group)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for group in list(self.sharing):
            self.share(group)

    def _emit(self, kind: str, group: int) -> None:
        self.ops.append(Op(kind, self.groups[group].name))


class _Flight(NamedTuple):
    """A transfer under way: the ``number``-th of its group's gradient path."""

    group: int
    microbatch: int
    number: int


class Paths:
    """Walks the paths of gradients; ``in_flight`` are the transfers under way."""

    def __init__(self, bare: Schedule, updates: Updates, ops: list[Op]) -> None:
        self.groups, self.policy, self.program, self.train = bare.groups, bare.policy, bare.program, bare.train
        self.last = bare.accumulate - 1
        self.updates, self.ops = updates, ops
        self.paths = [group.at("gradient") for group in bare.groups]
        rows = [row for row in KINDS.values() if row.stage == "gradient"]
        self.in_flight: dict[str, deque[_Flight]] = {row.name: deque() for row in rows}  # the oldest first

    def before(self, k: int) -> None:
        """Compute ``k`` is next: a gradient that it fills must not be on its way any more."""
        at = k % len(self.program.computes)
        for g in self.program.reads[self.program.computes[at].target]:
            if self.paths[g] and self.program.filled(g)[0] == at:
                self._until_over(g, self.paths[g][0].kind)

    def after(self, k: int) -> None:
        """Compute ``k`` is over: gradients that it completed begin their paths, those that nothing fills at the end."""
        microbatch, at = divmod(k, len(self.program.computes))
        if self.train and self.policy.reduces_in(microbatch, self.last + 1):
            unread = range(len(self.groups)) if at == len(self.program.computes) - 1 else ()
            for g in dict.fromkeys((*self.program.reads[self.program.computes[at].target], *unread)):
                if self.groups[g].trainable and self.program.filled(g)[1] == at:
                    self._walk(g, microbatch, 0)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for kind, flights in self.in_flight.items():
            while flights:
                self._wait(kind)

    def _walk(self, group: int, microbatch: int, done: int) -> None:
        """The first ``done`` transfers of a gradient's path are over: start the next one, or update."""
        path = self.paths[group]
        if done == len(path):
            if self.policy.update == "in_backward" and microbatch == self.last:
                self.updates.issue(group)
            return
        transfer = path[done]
        kind, row, flights = transfer.kind, transfer.row, self.in_flight[transfer.kind]
        if microbatch < self.last and not row.each_microbatch:
            return
        self._until_over(group, kind)
        flight = _Flight(group, microbatch, done)
        if self._over_at_once(flight):
            self._emit(kind, flight)
            self._over(flight)
            return
        while flights and (len(flights) >= self.policy.reduces + row.spare or self._hurried(flights[0])):
            self._wait(kind)
        self._emit(kind, flight)
        flights.append(flight)

    def _emit(self, kind: str, flight: _Flight) -> None:
        each = self.paths[flight.group][flight.number].row.each_microbatch
        self.ops.append(Op(kind, self.groups[flight.group].name, 0, flight.microbatch if each else 0))

    def _wait(self, kind: str) -> None:
        self._over(self.in_flight[kind].popleft())

    def _over(self, flight: _Flight) -> None:
        row = self.paths[flight.group][flight.number].row
        self._emit(row.wait, flight)
        self._walk(flight.group, flight.microbatch, flight.number + 1)

    def _until_over(self, group: int, kind: str) -> None:
        """What a transfer reads holds one microbatch at a time: the one before must be over."""
        while any([flight.group == group for flight in self.in_flight[kind]]):
            self._wait(kind)

    def _over_at_once(self, flight: _Flight) -> bool:
        """A transfer that sends nothing takes no place on a link: what follows it can start now."""
        path = self.paths[flight.group]
        return not path[flight.number].sent and flight.number + 1 < len(path)

    def _hurried(self, flight: _Flight) -> bool:
        """A transfer is over when the next of its kind begins, if what follows it takes the slower link.

        Every compute by which that begins later is one more in which the slower link is idle.
        """
        path = self.paths[flight.group]
        return flight.microbatch == self.last and flight.number + 1 < len(path) and path[flight.number + 1].row.slow
