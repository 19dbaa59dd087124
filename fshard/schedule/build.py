"""Building a schedule: one rule that turns a program into ops.

The compute ops of the step stand first: per microbatch ``forward root``, the forward calls, the backward
calls, ``backward root``. Everything else is placed around them. Before compute k: gather what the computes
k to k+prefetch read and is not there, each trainable group's update ahead of its first gather; wait for what
k reads. Groups that are not gathered are updated together, before the first compute. After compute k: free
what it read, unless the next window reads it again; reduce the gradients that it completed.

A gradient shard that has replicas is summed over them as soon as it has collected its last microbatch, and waited
for as late as can be: before the commit, or where more than ``reduces`` other sums would be in flight. Its reduction
is collected when the next one begins, however many may be in flight, unless an older one is that no sum follows: the
sum takes the slower link, and every compute that it begins later by is one more in which that link is idle. Groups of
which each rank updates but a part come first of all: their updates, and the sending of what they changed, stand at the
begin of the step in the order of use, and are waited for where the group is first gathered or read. That is at most
one compute ahead: a gather that runs further ahead would keep compute waiting for what a later unit reads. Complete
gradients that are updated with in host memory go there like sums over replicas: at once, and waited for as late.

Around a turn (from the last forward call to the first backward call, and from a microbatch to the next) the
window for keeping is that of the first call after it. What it holds is there at that call anyway, and so is
less than that before it: to keep it costs no memory and saves gathers.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from fshard.schedule.ops import ROOT, GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule


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
        train: False for a schedule of forward only: no update, reduce, collect or commit. ``backward root``
            is there all the same and marks the end of the code outside of units, whose groups are live until
            then.

    Returns:
        The schedule, a function of the arguments alone. Time and size are linear in the program's reads.

    Raises:
        PlanError: the arguments do not belong together.

    >>> from fshard.schedule.ops import Call
    >>> group = GroupInfo("layer", 64, 32, 64, 0, gathered=True, reduced=True, trainable=True)
    >>> program = Program((Call("layer"),), (Call("layer"),), {"layer": (0,)})
    >>> [op.kind for op in build(program, [group], Policy())]  # doctest: +NORMALIZE_WHITESPACE
    ['agree', 'update', 'gather', 'forward', 'wait', 'forward', 'backward', 'free', 'reduce', 'backward',
     'collect', 'commit']
    """
    if not train:
        program = replace(program, backward=())
    bare = Schedule((), tuple(groups), program, policy, accumulate, train)
    return replace(bare, ops=tuple(_Builder(bare).run()))


class _Builder:
    """The ops so far, and what they leave: which groups are there, what is in flight."""

    def __init__(self, bare: Schedule) -> None:
        self.groups, self.policy, self.train = bare.groups, bare.policy, bare.train
        self.reads, self.accumulate = bare.program.reads, bare.accumulate
        self.computes = _computes(bare.program, bare.accumulate)
        self.uses: list[list[int]] = [[] for _ in self.groups]
        for k, op in enumerate(self.computes):
            for g in self.reads[op.target]:
                self.uses[g].append(k)
        self.passed = [0] * len(self.groups)  # how many of its uses lie behind
        self.kept = self.policy.kept(bare.program)
        self.horizons = _horizons(bare.program, bare.accumulate, self.policy.prefetch)
        self.edge = 0  # computes before it have been asked for
        self.state = [""] * len(self.groups)  # "", "coming" or "live"
        self.updated: set[int] = set()
        self.flying: deque[tuple[int, int]] = deque()  # reduces in flight, oldest first: (group, microbatch)
        self.aloft: set[int] = set()  # their groups
        self.summing: deque[int] = deque()  # sums over replicas in flight, oldest first
        self.leaving: deque[int] = deque()  # gradients on their way to host memory, oldest first
        self.spreading: dict[int, None] = {}  # groups whose ranges are under way
        self.begins, self.completes = _gradients(bare.program, self.groups)
        self.ops: list[Op] = []

    def run(self) -> list[Op]:
        """All ops."""
        self._emit("agree")
        order = sorted(range(len(self.uses)), key=lambda g: (not self.uses[g], self.uses[g][:1]))
        for g in order:
            if self.groups[g].spread:
                self._update_first(g)
        for g, uses in enumerate(self.uses):
            if not uses and self.groups[g].gathered:
                self._update_first(g)
        for k, op in enumerate(self.computes):
            self._before(k, op)
            self.ops.append(op)
            self._after(k, op)
        while self.flying:
            self._collect()
        while self.summing:
            self._total()
        while self.leaving:
            self._stored()
        for g in list(self.spreading):
            self._join(g)
        if self.train:
            self._emit("commit")
        return self.ops

    def _emit(self, kind: str, group: int = -1, microbatch: int = 0) -> None:
        self.ops.append(Op(kind, self.groups[group].name if group >= 0 else "", 0, microbatch))

    def _before(self, k: int, op: Op) -> None:
        # What the window held one compute ago is still there, since nothing was freed that it reads: only its
        # new end has to be asked for.
        while self.edge <= min(k + self.policy.prefetch, len(self.computes) - 1):
            reads = self.reads[self.computes[self.edge].target]
            if self.edge > k + 1 and any(self.groups[g].gathered and g in self.spreading for g in reads):
                break
            for g in reads:
                self._request(g)
            self.edge += 1
        if k == 0:
            # Together, so that one kernel call can do them all, and behind the first gathers, which hide them.
            for g, info in enumerate(self.groups):
                if not info.gathered:
                    self._update_first(g)
        for g in self.reads[op.target]:
            self._join(g)
            if self.state[g] == "coming":
                self._emit("wait", g)
                self.state[g] = "live"
        if op.kind == "backward" and self.train:
            for g in self.begins.get((op.target, op.index), ()):
                self._collect_until_landed(g)

    def _after(self, k: int, op: Op) -> None:
        for g in self.reads[op.target]:
            self.passed[g] += 1
            if self.state[g] == "live" and not self._reused(g, self.horizons[k + 1]):
                self._emit("free", g)
                self.state[g] = ""
        if op.kind == "backward" and self.train and self.policy.reduces_in(op.microbatch, self.accumulate):
            for g in self.completes.get((op.target, op.index), ()):
                self._complete(g, op.microbatch)

    def _reused(self, group: int, horizon: int) -> bool:
        uses, passed = self.uses[group], self.passed[group]
        return passed < len(uses) and (group in self.kept or uses[passed] <= horizon)

    def _request(self, group: int) -> None:
        if self.groups[group].gathered and not self.state[group]:
            self._update_first(group)
            self._join(group)
            self._emit("gather", group)
            self.state[group] = "coming"

    def _update_first(self, group: int) -> None:
        due = self.train and self.groups[group].trainable and self.policy.update == "deferred"
        if due and group not in self.updated:
            self._update(group)
            self.updated.add(group)

    def _update(self, group: int) -> None:
        self._emit("update", group)
        if self.groups[group].spread:
            self._emit("spread", group)
            self.spreading[group] = None

    def _join(self, group: int) -> None:
        if group in self.spreading:
            self._emit("join", group)
            del self.spreading[group]

    def _complete(self, group: int, microbatch: int) -> None:
        """The group has its gradient of this microbatch."""
        if not self.groups[group].reduced:
            self._update_last(group, microbatch)
            return
        self._collect_until_landed(group)
        if self.groups[group].local:
            self._emit("reduce", group, microbatch)
            self._landed(group, microbatch)
            return
        while self.flying and (len(self.flying) == self.policy.reduces or self._sums(*self.flying[0])):
            self._collect()
        self._emit("reduce", group, microbatch)
        self.flying.append((group, microbatch))
        self.aloft.add(group)

    def _collect_until_landed(self, group: int) -> None:
        """A flat gradient's range holds one microbatch at a time: the reduce before must be over."""
        while group in self.aloft:
            self._collect()

    def _collect(self) -> None:
        group, microbatch = self.flying.popleft()
        self.aloft.remove(group)
        self._landed(group, microbatch)

    def _landed(self, group: int, microbatch: int) -> None:
        self._emit("collect", group, microbatch)
        if not self._sums(group, microbatch):
            self._complete_on_device(group, microbatch)
            return
        while len(self.summing) > self.policy.reduces:
            self._total()
        self._emit("sum", group)
        self.summing.append(group)

    def _sums(self, group: int, microbatch: int) -> bool:
        """Whether a sum over replicas follows the reduction."""
        return self.groups[group].summed and microbatch == self.accumulate - 1

    def _total(self) -> None:
        group = self.summing.popleft()
        self._emit("total", group)
        self._complete_on_device(group, self.accumulate - 1)

    def _complete_on_device(self, group: int, microbatch: int) -> None:
        if not self.groups[group].offloaded or microbatch < self.accumulate - 1:
            self._update_last(group, microbatch)
            return
        while len(self.leaving) > self.policy.reduces:
            self._stored()
        self._emit("offload", group)
        self.leaving.append(group)

    def _stored(self) -> None:
        group = self.leaving.popleft()
        self._emit("stored", group)
        self._update_last(group, self.accumulate - 1)

    def _update_last(self, group: int, microbatch: int) -> None:
        if self.policy.update == "in_backward" and microbatch == self.accumulate - 1:
            self._update(group)


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
        if groups[g].trainable and groups[g].reduced:
            begins[place].append(g)
    for g, place in last.items():
        if groups[g].trainable:
            completes[place].append(g)
    return dict(begins), dict(completes)
