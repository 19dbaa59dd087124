"""Checking a schedule: an abstract interpreter that runs the ops on nothing but their rules.

It knows what the program, the groups and the policy demand, and takes nothing from ``build``, so that a schedule from
anywhere (built, parsed, written by hand) is held to the same rules.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fshard import errors
from fshard.schedule.ops import ROOT, STEP_KINDS, UNIT_KINDS, GroupInfo, Op, microbatch_kinds, op_kinds
from fshard.schedule.schedule import Schedule
from fshard.schedule.text import op_lines
from fshard.schedule.transfers import Transfer, awaited, started

CONTEXT = 4
"""Ops shown on each side of the one that fails."""


def check(schedule: Schedule) -> None:
    """Run the schedule's ops on nothing, and see that each finds what it needs.

    It holds that the compute ops are the program's, in order; that compute reads groups that are there,
    waited for and up to date; that slots are gathered, waited for and freed in turn, at most ``prefetch``
    computes ahead, and held no longer than the policy says; that each gradient goes through the transfers of its path
    in their order, each started once a step or microbatch, when what it reads is complete, with no more under way than
    the table of kinds allows, and waited for before its memory is filled again; that each update happens once and where
    the policy says, and what it changed of a shard that others hold too reaches them before anybody reads it; that
    ranges of the arena which are alive together are disjoint; and that nothing is left at the end.

    Raises:
        ScheduleError: the first op that breaks a rule, shown among its neighbours.
    """
    run = _Run(schedule)
    for at, op in enumerate(schedule.ops):
        problem = _shape(op, at, run) or next(run.take(at, op), None)
        if problem:
            raise _broken(schedule, at, problem)
    at, problem = run.leftover()
    if problem:
        raise _broken(schedule, at, problem)
    _check_memory(schedule)


@dataclass
class _Progress:
    """What has happened so far to one transfer of a group."""

    transfer: Transfer
    before: "_Progress | None"  # the one before it in its path
    limited: bool  # it counts among those under way: one that sends nothing before another is over at once
    started: int = 0  # times
    over: int = 0
    at: int = -1  # the op that started it last

    @property
    def under_way(self) -> bool:
        """Whether it was started and not waited for."""
        return self.started > self.over


@dataclass
class _Group:
    """What has happened to one group so far."""

    info: GroupInfo
    uses: list[int]  # positions, among the compute ops, of those that read it
    filled: tuple[int, int]  # the same, within one microbatch: first and last op that fills its gradient
    kept: bool
    passed: int = 0
    slot: str = "free"  # or "coming", "live"
    gathered_at: int = -1
    updated_at: int = -1
    progress: dict[str, _Progress] = field(default_factory=dict)  # by kind, of its gradient's path and after its update
    path: list[_Progress] = field(default_factory=list)  # those of the gradient
    shares: list[_Progress] = field(default_factory=list)  # those after the update

    @property
    def next_use(self) -> int | None:
        """Position of the next compute op that reads it."""
        return self.uses[self.passed] if self.passed < len(self.uses) else None

    @property
    def shared(self) -> bool:
        """Whether what other ranks updated of it is there."""
        return all([progress.over for progress in self.shares])


class _Run:
    """The interpreter: one method an op, each yielding what is wrong with it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.policy = schedule, schedule.policy
        self.names = {unit: [schedule.groups[i].name for i in ids] for unit, ids in schedule.program.reads.items()}
        self.length = len(schedule.program.computes)  # of a microbatch
        self.due = schedule.program.steps(schedule.accumulate)
        self.horizons = self.policy.horizons(schedule.program, schedule.accumulate)
        self.done = 0  # compute ops so far
        self.held: dict[str, None] = {}  # slots taken by groups that may not stay
        self.under_way: Counter[str] = Counter()  # limited transfers, by kind
        self.kinds, self.microbatch_kinds = op_kinds(), microbatch_kinds()
        self.groups: dict[str, _Group] = {}
        kept = self.policy.kept(schedule.program)
        for number, info in enumerate(schedule.groups):
            self.groups[info.name] = group = _Group(info, [], schedule.program.filled(number), number in kept)
            if schedule.train:
                group.path, group.shares = _chain(info.at("gradient")), _chain(info.at("updated"))
                group.progress = {progress.transfer.kind: progress for progress in (*group.path, *group.shares)}
        for position, op in enumerate(self.due):
            for name in self.names[op.target]:
                self.groups[name].uses.append(position)

    @property
    def microbatch(self) -> int:
        """The one that runs; between the last op of one and the first of the next, still the former."""
        return max(self.done - 1, 0) // self.length

    def take(self, at: int, op: Op) -> Iterator[str]:
        """What is wrong with this op, which then has happened."""
        if op.kind in UNIT_KINDS:
            yield from self._compute(op)
        elif op.kind == "consensus":
            yield from self._consensus(at)
        elif op.kind in STEP_KINDS:
            return
        elif op.kind == "update":
            yield from self._update(at, op, self.groups[op.target])
        elif op.kind == "free":
            yield from self._free(op, self.groups[op.target])
        else:
            yield from self._transfer(at, op, self.groups[op.target])

    def leftover(self) -> tuple[int, str]:
        """The op that is to blame, and how, if something is missing at the end."""
        last = len(self.schedule.ops) - 1
        if not self.schedule.ops:
            return 0, "there are no ops at all: handshake must be the first"
        if self.done < len(self.due):
            return last, f"the program is not over: '{self.due[self.done]}' is due"
        if self.schedule.train and self.schedule.ops[-1].kind != "consensus":
            return last, "consensus must be the last op of a train step"
        for name, group in self.groups.items():
            if group.slot != "free":
                return group.gathered_at, f"{name} is gathered here and never freed"
            for progress in group.progress.values():
                if progress.under_way:
                    return progress.at, f"{progress.transfer.kind} of {name} is started here and never waited for"
        return 0, ""

    def _compute(self, op: Op) -> Iterator[str]:
        if self.done == len(self.due):
            yield "the program is over"
            return
        if op != self.due[self.done]:
            yield f"the program has '{self.due[self.done]}' here"
        if self.done % self.length == 0:
            yield from self._microbatch_over()
        reads = self.names[op.target]
        for name in dict.fromkeys((*self.names[ROOT], *reads)):
            yield from self._readable(name, op.target)
        for name in reads if op.kind == "backward" else ():
            for progress in self.groups[name].path[:1]:
                if progress.under_way:
                    yield f"{name}'s gradient is filled again while its {_since(progress)}"
        for name in self.held:
            use = self.groups[name].next_use
            if use is None or use > self.horizons[self.done]:
                yield f"{name} must be free: no compute within prefetch={self.policy.prefetch} reads it"
        for name in reads:
            self.groups[name].passed += 1
        self.done += 1

    def _readable(self, name: str, unit: str) -> Iterator[str]:
        group = self.groups[name]
        if group.info.gathered and group.slot != "live":
            missing = {"free": "is not gathered", "coming": "was not waited for since its all-gather"}[group.slot]
            yield f"{unit} reads {name}, which {missing}"
        yield from self._stale(name, group, f"{unit} reads {name}")

    def _stale(self, name: str, group: _Group, what: str) -> Iterator[str]:
        """What is wrong if the parameters of a group are used now."""
        if self._updates_first(group):
            if group.updated_at < 0:
                yield f"{what} before its pending update"
            if not group.shared:
                yield f"{what} before the ranges that other ranks updated are there"

    def _microbatch_over(self) -> Iterator[str]:
        if not self.done or not self._reduces(self.microbatch):
            return
        for name, group in self.groups.items():
            for progress in group.path:
                if progress.transfer.row.each_microbatch and progress.started < self._times(progress, self.microbatch):
                    yield f"{name} had no {progress.transfer.kind} in microbatch {self.microbatch}"

    def _reduces(self, microbatch: int) -> bool:
        return self.policy.reduces_in(microbatch, self.schedule.accumulate)

    def _times(self, progress: _Progress, microbatch: int) -> int:
        """How often a transfer has been started when that of a microbatch has."""
        each = progress.transfer.row.each_microbatch
        return sum([self._reduces(number) for number in range(microbatch + 1)]) if each else 1

    def _transfer(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        row = started(op.kind) or awaited(op.kind)
        assert row is not None  # ``_shape`` knows all kinds
        if row.stage == "read":
            yield from (self._gather(at, op, group) if row.name == op.kind else self._gathered(op, group))
            return
        progress = group.progress.get(row.name)
        if progress is None:
            yield f"{op.target} has no {row.name} in {'this' if self.schedule.train else 'an eval'} step"
        elif row.name != op.kind:
            yield from self._wait(op, progress)
        else:
            yield from self._start(op, group, progress)
            progress.started, progress.at = progress.started + 1, at
            self.under_way[row.name] += progress.limited

    def _start(self, op: Op, group: _Group, progress: _Progress) -> Iterator[str]:
        row, last = progress.transfer.row, self.schedule.accumulate - 1
        microbatch = op.microbatch if row.each_microbatch else last
        if progress.under_way:
            yield f"{op.target}'s {_since(progress)}"
        if row.each_microbatch:
            if microbatch != self.microbatch:
                yield f"microbatch {self.microbatch} is running"
            if not self._reduces(microbatch):
                yield f"gradients are reduced in microbatch {last} alone"
        if progress.started >= self._times(progress, microbatch):
            yield f"{row.name} of {op.target} was started at op {progress.at}"
        yield from self._unready(op.target, group, progress, microbatch)
        limit = self.policy.reduces + row.spare
        if row.stage == "gradient" and progress.limited and self.under_way[row.name] >= limit:
            beyond = f" allows {row.spare} more than that" if row.spare else ""
            yield f"{self.under_way[row.name]} {row.name} are under way; reduces={self.policy.reduces}{beyond}"

    def _unready(self, name: str, group: _Group, progress: _Progress, microbatch: int) -> Iterator[str]:
        """Why what a transfer reads is not complete."""
        if progress.before is not None:
            if progress.before.over < self._times(progress.before, microbatch):
                yield f"{progress.before.transfer.kind} of {name} must be waited for before"
        elif progress.transfer.row.stage == "updated":
            if group.updated_at < 0:
                yield f"{name} is sent before its update"
        else:
            if self.done <= microbatch * self.length + group.filled[1]:
                yield f"{self.due[group.filled[1]]} of this microbatch must come before"
            if self._updates_first(group) and group.updated_at < 0:
                yield f"{name}'s pending update needs the gradient that this one replaces"

    def _wait(self, op: Op, progress: _Progress) -> Iterator[str]:
        row = progress.transfer.row
        if not progress.under_way or progress.started != self._times(progress, op.microbatch):
            of = f" of microbatch {op.microbatch}" if row.each_microbatch else ""
            yield f"no {row.name} of {op.target}{of} is under way"
        progress.over = progress.started
        self.under_way[row.name] -= progress.limited

    def _gather(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        use = group.next_use
        if group.info.transfer(op.kind) is None:
            yield f"{op.target} is resident: compute reads it where it lies"
        if group.slot != "free":
            yield f"{op.target} holds its slot since op {group.gathered_at}"
        if use is None:
            yield f"no compute reads {op.target} any more"
        elif use > self.done + self.policy.prefetch:
            yield f"{op.target} is read {use - self.done} computes ahead; prefetch={self.policy.prefetch}"
        if group.kept and group.gathered_at >= 0:
            yield f"{op.target} stays for the step once gathered; it was gathered at op {group.gathered_at}"
        yield from self._stale(op.target, group, f"{op.target} is gathered")
        group.slot, group.gathered_at = "coming", at
        if not group.kept:
            self.held[op.target] = None

    def _gathered(self, op: Op, group: _Group) -> Iterator[str]:
        if group.slot != "coming":
            yield f"no {op.kind[5:]} of {op.target} is under way"
        group.slot = "live"

    def _free(self, op: Op, group: _Group) -> Iterator[str]:
        if group.slot != "live":
            yield f"{op.target} {'is still under way' if group.slot == 'coming' else 'is not gathered'}"
        group.slot = "free"
        self.held.pop(op.target, None)

    def _updates_first(self, group: _Group) -> bool:
        return self.schedule.train and group.info.trainable and self.policy.update == "deferred"

    def _update(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        last = self.schedule.accumulate - 1
        if not (self.schedule.train and group.info.trainable):
            yield f"{op.target} is {'frozen' if self.schedule.train else 'not trained in an eval step'}"
        if group.updated_at >= 0:
            yield f"{op.target} was updated at op {group.updated_at}"
        if self.policy.update == "deferred":
            if group.passed or group.gathered_at >= 0:
                yield f"{op.target} was gathered or read before its pending update"
        elif group.next_use is not None:
            yield f"{op.target} is read again after its update"
        elif group.path:
            yield from self._incomplete(op.target, group)
        elif self.done <= last * self.length + group.filled[1]:
            yield f"{op.target} has no gradient of microbatch {last} yet"
        group.updated_at = at

    def _incomplete(self, name: str, group: _Group) -> Iterator[str]:
        """What of a gradient's path is not over."""
        for progress in group.path:
            if progress.over < self._times(progress, self.schedule.accumulate - 1):
                yield f"{progress.transfer.kind} of {name} is not over"

    def _consensus(self, at: int) -> Iterator[str]:
        if not self.schedule.train:
            yield "an eval step ends without a consensus op"
        if at != len(self.schedule.ops) - 1:
            yield "consensus must be the last op"
        if self.done < len(self.due):
            yield f"the program is not over: '{self.due[self.done]}' is due"
        yield from self._microbatch_over()
        for name, group in self.groups.items():
            yield from self._incomplete(name, group)
            if group.info.trainable and group.updated_at < 0:
                yield f"{name} was not updated"
            if not group.shared:
                yield f"{name}'s updated ranges are not there"


def _chain(path: tuple[Transfer, ...]) -> list[_Progress]:
    """A path before its first transfer."""
    chain: list[_Progress] = []
    for number, transfer in enumerate(path):
        limited = transfer.sent > 0 or number + 1 == len(path)
        chain.append(_Progress(transfer, chain[-1] if chain else None, limited))
    return chain


def _since(progress: _Progress) -> str:
    return f"{progress.transfer.kind} since op {progress.at} is under way"


def _shape(op: Op, at: int, run: _Run) -> str:
    """What is wrong with an op by itself."""
    if op.kind not in run.kinds:
        return f"{op.kind!r} is none of {', '.join(sorted(run.kinds))}"
    if (op.kind == "handshake") != (at == 0):
        return "handshake must be the first op, and no other"
    known = run.names if op.kind in UNIT_KINDS else ("",) if op.kind in STEP_KINDS else run.groups
    if op.target not in known:
        return f"{op.target!r} is not a {'unit' if op.kind in UNIT_KINDS else 'group'} of this schedule"
    if op.index and op.kind not in UNIT_KINDS or op.microbatch and op.kind not in run.microbatch_kinds:
        return f"{op.kind} has no {'call index' if op.index else 'microbatch'}"
    return ""


def _check_memory(schedule: Schedule) -> None:
    """Sweep over the ops with the ranges alive, sorted by offset: each new one must fit in between."""
    memory = schedule.memory
    ranges = {item: (at, at + memory.sizes[item], item) for item, at in memory.offsets.items()}
    begin: list[list[str]] = [[] for _ in schedule.ops]
    end: list[list[str]] = [[] for _ in schedule.ops]
    for item, (low, high, _) in ranges.items():
        lives = memory.lifetimes[item]
        if low < 0 or high > memory.arena_bytes:
            raise _broken(schedule, lives[0][0], f"{item} lies outside of the arena")
        for first, last in lives if high > low else ():
            begin[first].append(item)
            end[last].append(item)
    alive: list[tuple[int, int, str]] = []
    for at in range(len(schedule.ops)):
        for item in begin[at]:
            low, high, _ = ranges[item]
            place = bisect_left(alive, ranges[item])
            for other in alive[max(place - 1, 0) : place + 1]:
                if other[1] > low and other[0] < high:
                    raise _broken(schedule, at, f"{item} overlaps {other[2]} in the arena")
            insort(alive, ranges[item])
        for item in end[at]:
            alive.remove(ranges[item])


def _broken(schedule: Schedule, at: int, problem: str) -> errors.ScheduleError:
    """The error of a schedule that breaks a rule at this op."""
    rows = enumerate(op_lines(schedule.ops, schedule.accumulate))
    shown = [f"{'->' if i == at else '  '} {line}" for i, line in rows if abs(i - at) <= CONTEXT]
    return errors.broken_schedule(problem, shown)
