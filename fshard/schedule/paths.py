"""Walking the paths of gradients, and what follows their updates, while a schedule is built.

One rule: when a transfer of a path is over, the next one of the group starts at once, and it is waited for as late as
can be, which is when another of its kind would exceed the limit, or at the end of the step. Two rules that were found
by measurement change that: ``_over_at_once`` and ``_hurried``.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fshard.schedule.ops import UPDATED, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Local, Pass
from fshard.schedule.transfers import KINDS, Transfer


class Updates:
    """Emits the updates of groups, and the transfers that each makes necessary: ``sharing`` are those under way.

    Updates beside compute are waited for; ``running`` are those that were not yet.
    """

    def __init__(self, bare: Schedule, ops: list[Op]) -> None:
        self.groups, self.ops = bare.groups, ops
        updates = bare.stages.updates
        self.after = [group.at("updated") if g in updates else () for g, group in enumerate(bare.groups)]
        self.pending = set(updates) if bare.policy.update != "in_backward" else set()
        self.beside = bare.policy.update == "beside"
        self.running: dict[int, None] = {}
        self.edge = 0  # updates of what computes before it read have begun
        self.reading: dict[int | None, list[int]] = {}  # which updates read a gradient
        for group, gradient in updates.items():
            self.reading.setdefault(gradient, []).append(group)
        self.sharing: dict[int, tuple[Transfer, ...]] = {}

    def partial_first(self, order: Sequence[int]) -> None:
        """Update partially updated groups first, in the order of use.

        What they have changed is then on its way to other ranks while the first ones are gathered and compute.
        """
        for g in order:
            if self.after[g] and self.beside:
                self.ahead(g)
        for g in order:
            if self.after[g]:
                self.first(g)

    def first(self, group: int) -> None:
        """Update before a group is used, where the update is the one that the step before has left."""
        self.ahead(group)
        if group in self.running:
            del self.running[group]
            self._emit(UPDATED, group)
            self._begin_share(group)

    def up_to(self, last: int, reads: Sequence[Sequence[int]]) -> None:
        """Begin updates of what the computes up to this one read, where they run beside compute."""
        while self.beside and self.edge <= min(last, len(reads) - 1):
            for group in reads[self.edge]:
                self.ahead(group)
            self.edge += 1

    def ahead(self, group: int) -> None:
        """Begin an update that the step before has left; one beside compute is not over then."""
        if group in self.pending:
            self.pending.discard(group)
            self.issue(group)

    def replaced(self, gradient: int) -> None:
        """A gradient is about to be replaced: what it was for must be updated before."""
        for group in self.reading.get(gradient, ()):
            self.first(group)

    def issue(self, group: int) -> None:
        """Update, and begin to send what this rank has changed."""
        self._emit("update", group)
        if self.beside:
            self.running[group] = None
        else:
            self._begin_share(group)

    def _begin_share(self, group: int) -> None:
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
        for group in list(self.running):
            self.first(group)
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
        self.groups, self.policy = bare.groups, bare.policy
        self.updates, self.ops = updates, ops
        fillings = bare.stages.fillings
        self.last = {gradient: filling.last for gradient, filling in fillings.items()}
        self.paths = [group.at("gradient") if g in fillings else () for g, group in enumerate(bare.groups)]
        self.begins: list[Sequence[int]] = []  # the gradients that each compute op is the first to fill
        self.completes: list[Sequence[int]] = []  # those that it is the last to fill
        for stage in bare.stages.stages:
            if isinstance(stage, Local):
                self.begins.append(())
                self.completes.append(())
                continue
            begins, completes = _filled(stage)
            self.begins += begins
            self.completes += completes
        rows = [row for row in KINDS.values() if row.stage == "gradient"]
        self.in_flight: dict[str, deque[_Flight]] = {row.name: deque() for row in rows}  # the oldest first

    def before(self, k: int) -> None:
        """Compute ``k`` is next: a gradient that it fills must not be on its way any more, nor wait for its update."""
        for g in self.begins[k]:
            self.updates.replaced(g)
            if self.paths[g]:
                self._until_over(g, self.paths[g][0].kind)
        for g in self.completes[k]:  # without transfers, those that nothing has filled are zero once it is over
            if not self.paths[g]:
                self.updates.replaced(g)

    def after(self, k: int, microbatch: int) -> None:
        """Compute ``k`` is over: gradients that it completed begin their paths, those that nothing fills at the end."""
        for g in self.completes[k]:
            if self.policy.reduces_in(microbatch, self.last[g] + 1):
                self.updates.replaced(g)
                self._walk(g, microbatch, 0)

    def complete(self, groups: Sequence[int]) -> None:
        """See that gradients have been through their paths, each kind of transfer of all of them before the next."""
        for kind in self.in_flight:
            for group in groups:
                self._until_over(group, kind)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for kind, flights in self.in_flight.items():
            while flights:
                self._wait(kind)

    def _walk(self, group: int, microbatch: int, done: int) -> None:
        """The first ``done`` transfers of a gradient's path are over: start the next one, or update."""
        path = self.paths[group]
        if done == len(path):
            if self.policy.update == "in_backward" and microbatch == self.last[group]:
                self.updates.issue(group)
            return
        transfer = path[done]
        kind, row, flights = transfer.kind, transfer.row, self.in_flight[transfer.kind]
        if microbatch < self.last[group] and not row.each_microbatch:
            return
        self._until_over(group, kind)
        flight = _Flight(group, microbatch, done)
        if self._over_at_once(flight):
            self._emit(kind, flight)
            self._over(flight)
            return
        while flights and (len(flights) >= max(self.policy.reduces + row.spare, 1) or self._hurried(flights[0])):
            self._wait(kind)
        self._emit(kind, flight)
        flights.append(flight)
        if not self.policy.reduces:
            self._wait(kind)

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
        """Require the transfer before to be over: what one reads holds one microbatch at a time."""
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
        return (
            flight.microbatch == self.last[flight.group]
            and flight.number + 1 < len(path)
            and path[flight.number + 1].row.slow
        )


def _filled(each: Pass) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """For each compute op of a pass, the gradients that it is the first, and the last, to fill.

    Those that no op fills are complete, with zeros, after the last op of a microbatch.
    """
    gradients = each.gradients or {}
    begins: list[Sequence[int]] = []
    completes: list[Sequence[int]] = []
    ends = {microbatch: position for position, (microbatch, _) in enumerate(each.sequence)}
    for position, (microbatch, at) in enumerate(each.sequence):
        read = [g for g in each.program.fills(each.program.computes[at]) if g in gradients]
        begins.append([gradients[g] for g in read if each.filled[microbatch, g][0] == position])
        ready = dict.fromkeys((*read, *gradients)) if position == ends[microbatch] else read
        completes.append([gradients[g] for g in ready if each.filled[microbatch, g][1] == position])
    return begins, completes
