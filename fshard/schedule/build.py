"""Building a schedule: one rule that turns a program into ops.

The compute ops of the step stand first: per microbatch ``forward root``, the forward calls, the backward
calls, ``backward root``. Everything else is placed around them. Before compute k: all-gather what the computes
k to k+prefetch read and is not there, each trainable group's update ahead of its first all-gather; wait for what
k reads. Groups that are not gathered are updated together, before the first compute. After compute k: free
what it read, unless the next window reads it again; and let the gradients that it completed begin their paths.

A path (``transfers.py``) is walked by one rule: when a transfer is over, the next one of the group starts at once, and
it is waited for as late as can be, which is when another of its kind would exceed the limit, or at the end of the step.
What was found by measurement changes that in four places, each a named rule below:

* ``_over_at_once``: a transfer that sends nothing takes no place on a link.
* ``_hurried``: what a sum over replicas follows is over when the next of its kind begins.
* ``_update_partial_groups``: groups of which each rank updates a part are updated first of all.
* ``_updates_under_way``: an all-gather that waits for other ranks' updates runs one compute ahead at most.

Around a turn (from the last forward call to the first backward call, and from a microbatch to the next) the
window for keeping is that of the first call after it. What it holds is there at that call anyway, and so is
less than that before it: to keep it costs no memory and saves gathers.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fshard.schedule.ops import ROOT, GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import KINDS, Transfer


def build(
    program: Program, groups: Sequence[GroupInfo], policy: Policy, accumulate: int = 1, train: bool = True
) -> Schedule:
    """The schedule of one step.

    Args:
        program: what the loss function does. Its backward is left out where ``train`` is False.
        groups: the groups, by id. Trainable ones that nobody reads are updated, and reduced as zeros, all
            the same.
        policy: how far to run ahead, and what to keep.
        accumulate: microbatches in the step.
        train: False for a schedule of forward only: no update, no path of a gradient, no consensus. ``backward
            root`` is there all the same and marks the end of the code outside of units, whose groups are live
            until then.

    Returns:
        The schedule, a function of the arguments alone. Time and size are linear in the program's reads.

    Raises:
        PlanError: the arguments do not belong together.

    >>> from fshard.schedule import Call, Transfer
    >>> path = Transfer("all_gather", "state", "param"), Transfer("reduce_scatter", "grad", "shard")
    >>> program = Program((Call("layer"),), (Call("layer"),), {"layer": (0,)})
    >>> for op in build(program, [GroupInfo("layer", 64, 32, 64, True, path)], Policy()):
    ...     print(op)
    handshake
    update layer
    all_gather layer
    forward root
    wait all_gather layer
    forward layer
    backward layer
    free layer
    reduce_scatter layer
    backward root
    wait reduce_scatter layer
    consensus
    """
    if not train:
        program = replace(program, backward=())
    bare = Schedule((), tuple(groups), program, policy, accumulate, train)
    return replace(bare, ops=tuple(_Builder(bare).run()))


class _Builder:
    """The ops so far, and what they leave: which groups are there, what is under way."""

    def __init__(self, bare: Schedule) -> None:
        self.groups, self.policy, self.train = bare.groups, bare.policy, bare.train
        self.reads, self.last = bare.program.reads, bare.accumulate - 1
        self.computes = _computes(bare.program, bare.accumulate)
        self.uses: list[list[int]] = [[] for _ in self.groups]
        for k, op in enumerate(self.computes):
            for g in self.reads[op.target]:
                self.uses[g].append(k)
        self.passed = [0] * len(self.groups)  # how many of its uses lie behind
        self.kept = self.policy.kept(bare.program)
        self.horizons = _horizons(bare.program, bare.accumulate, self.policy.prefetch)
        self.edge = 0  # computes before it have been asked for
        self.read = [next(iter(group.at("read")), None) for group in self.groups]
        self.paths = [group.at("gradient") for group in self.groups]
        self.state = [""] * len(self.groups)  # "", "coming" or "live"
        self.updated: set[int] = set()
        rows = [row for row in KINDS.values() if row.stage == "gradient"]
        self.flying: dict[str, deque[_Flight]] = {row.name: deque() for row in rows}  # the oldest first
        self.sharing: dict[int, tuple[Transfer, ...]] = {}  # groups whose updates are under way, and what is left
        self.begins, self.completes = _gradients(bare.program, self.groups)
        self.ops: list[Op] = []

    def run(self) -> list[Op]:
        """All ops."""
        self.ops.append(Op("handshake"))
        self._update_partial_groups()
        for g, uses in enumerate(self.uses):
            if not uses and self.read[g]:
                self._update_first(g)
        for k, op in enumerate(self.computes):
            self._before(k, op)
            self.ops.append(op)
            self._after(k, op)
        for kind, flights in self.flying.items():
            while flights:
                self._wait(kind)
        for g in list(self.sharing):
            self._share(g)
        if self.train:
            self.ops.append(Op("consensus"))
        return self.ops

    def _emit(self, kind: str, group: int, microbatch: int = 0) -> None:
        self.ops.append(Op(kind, self.groups[group].name, 0, microbatch))

    def _before(self, k: int, op: Op) -> None:
        # What the window held one compute ago is still there, since nothing was freed that it reads: only its
        # new end has to be asked for.
        while self.edge <= min(k + self.policy.prefetch, len(self.computes) - 1):
            reads = self.reads[self.computes[self.edge].target]
            if self.edge > k + 1 and self._updates_under_way(reads):
                break
            for g in reads:
                self._request(g)
            self.edge += 1
        if k == 0:
            # Together, so that one kernel call can do them all, and behind the first gathers, which hide them.
            for g, read in enumerate(self.read):
                if read is None:
                    self._update_first(g)
        for g in self.reads[op.target]:
            self._share(g)
            read = self.read[g]
            if self.state[g] == "coming" and read is not None:
                self._emit(read.row.wait, g)
                self.state[g] = "live"
        if op.kind == "backward" and self.train:
            for g in self.begins.get((op.target, op.index), ()):
                self._until_over(g, self.paths[g][0].kind)

    def _after(self, k: int, op: Op) -> None:
        for g in self.reads[op.target]:
            self.passed[g] += 1
            if self.state[g] == "live" and not self._reused(g, self.horizons[k + 1]):
                self._emit("free", g)
                self.state[g] = ""
        if op.kind == "backward" and self.train and self.policy.reduces_in(op.microbatch, self.last + 1):
            for g in self.completes.get((op.target, op.index), ()):
                self._walk(g, op.microbatch, 0)

    def _reused(self, group: int, horizon: int) -> bool:
        uses, passed = self.uses[group], self.passed[group]
        return passed < len(uses) and (group in self.kept or uses[passed] <= horizon)

    def _request(self, group: int) -> None:
        read = self.read[group]
        if read is not None and not self.state[group]:
            self._update_first(group)
            self._share(group)
            self._emit(read.kind, group)
            self.state[group] = "coming"

    def _update_first(self, group: int) -> None:
        due = self.train and self.groups[group].trainable and self.policy.update == "deferred"
        if due and group not in self.updated:
            self.updated.add(group)
            self._update(group)

    def _update(self, group: int) -> None:
        """The update, and the start of what it makes necessary."""
        self._emit("update", group)
        path = self.groups[group].at("updated")
        if path:
            self._emit(path[0].kind, group)
            self.sharing[group] = path

    def _share(self, group: int) -> None:
        """See that what other ranks updated of a group is there."""
        path = self.sharing.pop(group, ())
        for number, transfer in enumerate(path):
            if number:
                self._emit(transfer.kind, group)
            self._emit(transfer.row.wait, group)

    def _update_partial_groups(self) -> None:
        """Groups of which each rank updates a part come first, in the order of use.

        What they have changed is then on its way to other ranks while the first ones are gathered and compute.
        """
        order = sorted(range(len(self.uses)), key=lambda g: (not self.uses[g], self.uses[g][:1]))
        for g in order:
            if self.groups[g].at("updated"):
                self._update_first(g)

    def _updates_under_way(self, reads: Sequence[int]) -> bool:
        """Whether an all-gather must still wait for other ranks' updates.

        It then runs one compute ahead at most. Further ahead, compute would wait for what a later unit reads.
        """
        return any([g in self.sharing and self.read[g] is not None for g in reads])

    def _walk(self, group: int, microbatch: int, done: int) -> None:
        """The first ``done`` transfers of a gradient's path are over: start the next one, or update."""
        path = self.paths[group]
        if done == len(path):
            if self.policy.update == "in_backward" and microbatch == self.last:
                self._update(group)
            return
        transfer = path[done]
        kind, row, flights = transfer.kind, transfer.row, self.flying[transfer.kind]
        if microbatch < self.last and not row.each_microbatch:
            return
        self._until_over(group, kind)
        flight = _Flight(group, microbatch, done)
        if self._over_at_once(flight):
            self._emit(kind, group, microbatch if row.each_microbatch else 0)
            self._over(flight)
            return
        while flights and (len(flights) >= self.policy.reduces + row.spare or self._hurried(flights[0])):
            self._wait(kind)
        self._emit(kind, group, microbatch if row.each_microbatch else 0)
        flights.append(flight)

    def _wait(self, kind: str) -> None:
        self._over(self.flying[kind].popleft())

    def _over(self, flight: "_Flight") -> None:
        row = self.paths[flight.group][flight.number].row
        self._emit(row.wait, flight.group, flight.microbatch if row.each_microbatch else 0)
        self._walk(flight.group, flight.microbatch, flight.number + 1)

    def _until_over(self, group: int, kind: str) -> None:
        """What a transfer reads holds one microbatch at a time: the one before must be over."""
        while any([flight.group == group for flight in self.flying[kind]]):
            self._wait(kind)

    def _over_at_once(self, flight: "_Flight") -> bool:
        """A transfer that sends nothing takes no place on a link: what follows it can start now."""
        path = self.paths[flight.group]
        return not path[flight.number].sent and flight.number + 1 < len(path)

    def _hurried(self, flight: "_Flight") -> bool:
        """A transfer is over when the next of its kind begins, if what follows it takes the slower link.

        Every compute by which that begins later is one more in which the slower link is idle.
        """
        path = self.paths[flight.group]
        return flight.microbatch == self.last and flight.number + 1 < len(path) and path[flight.number + 1].row.slow


class _Flight(NamedTuple):
    """A transfer under way: the ``number``-th of its group's gradient path."""

    group: int
    microbatch: int
    number: int


def _computes(program: Program, accumulate: int) -> list[Op]:
    """The compute ops of a step, in order."""
    once = [
        Op("forward", ROOT),
        *(Op("forward", call.unit, call.index) for call in program.forward),
        *(Op("backward", call.unit, call.index) for call in program.backward),
        Op("backward", ROOT),
    ]
    return [Op(op.kind, op.target, op.index, m) for m in range(accumulate) for op in once]


def _horizons(program: Program, accumulate: int, prefetch: int) -> list[int]:
    """For each compute, and for the end, the last one whose groups are kept for it."""
    forward, length = len(program.forward), len(program.forward) + len(program.backward) + 2
    horizons = [k + prefetch for k in range(accumulate * length + 1)]
    if program.forward and program.backward:
        for start in range(0, accumulate * length, length):
            end = start + length - 1
            for last, first in ((start + forward, start + forward + 1), (end - 1, end + 2)):
                for k in range(max(last - prefetch + 1, 0), min(first + 1, len(horizons))):
                    horizons[k] = max(horizons[k], first + prefetch)
    return horizons


Places = dict[tuple[str, int], list[int]]
"""Groups by the backward op, (unit, call index), at which something happens to them."""


def _gradients(program: Program, groups: Sequence[GroupInfo]) -> tuple[Places, Places]:
    """Where each trainable group's gradient begins and where it is complete, within one microbatch.

    A group that no backward op fills is complete, with zeros, at the end of the backward: ranks whose batches
    lead to different gradients must still issue the same reduces.
    """
    first: dict[int, tuple[str, int]] = {}
    last: dict[int, tuple[str, int]] = {}
    for unit, index in (*((call.unit, call.index) for call in program.backward), (ROOT, 0)):
        for g in program.reads[unit]:
            first.setdefault(g, (unit, index))
            last.pop(g, None)  # so that groups are in the order of their last reader
            last[g] = unit, index
    for g in range(len(groups)):
        last.setdefault(g, (ROOT, 0))
    begins, completes = defaultdict(list), defaultdict(list)
    for g, place in first.items():
        if groups[g].reduced:
            begins[place].append(g)
    for g, place in last.items():
        if groups[g].trainable:
            completes[place].append(g)
    return dict(begins), dict(completes)
