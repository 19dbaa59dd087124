"""Checking a schedule: an abstract interpreter that runs the ops on nothing but their rules.

It knows what the program, the groups and the policy demand, and takes nothing from ``build``, so that a schedule from
anywhere (built, parsed, written by hand) is held to the same rules.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from fshard import errors
from fshard.schedule import schedule_refusals
from fshard.schedule.check_activations import ActivationCheck, EdgeCheck
from fshard.schedule.ops import (
    COMPUTE_KINDS,
    LOCAL,
    ROOT,
    STEP_KINDS,
    UPDATED,
    Op,
    call_kinds,
    microbatch_kinds,
    op_kinds,
)
from fshard.schedule.progress import GroupProgress, Progress, parts_of, tracks_of
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Local
from fshard.schedule.text import op_lines
from fshard.schedule.transfers import awaited, started

CONTEXT = 4
"""Ops shown on each side of the one that fails."""


def check(schedule: Schedule) -> None:
    """Run the schedule's ops on nothing, and see that each finds what it needs.

    It holds that the compute ops are the program's, in order; that compute reads groups that are there,
    waited for and up to date; that slots are gathered, waited for and freed in turn, at most ``prefetch``
    computes ahead, and held no longer than the policy says; that each gradient goes through the transfers of its path
    in their order, each started once a step or microbatch, when what it reads is complete, with no more under way than
    the table of kinds allows, and waited for before its memory is filled again; that each update happens once and where
    the policy says, and what it changed of a shard that others hold too reaches them before anybody reads it; that code
    between passes finds complete gradients and updated shards, and what it makes is gathered after it; that what units
    keep on the host leaves after their forward and is there before their backward; that ranges of the arena which are
    alive together are disjoint; and that nothing is left at the end.

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


class _Run:
    """The interpreter: one method an op, each yielding what is wrong with it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.policy = schedule, schedule.policy
        self.parts = parts_of(schedule)
        self.part = -1  # the one that runs; between the last op of one and the first of the next, still the former
        self.due = schedule.stages.steps
        self.horizons = self.policy.horizons(schedule.stages)
        self.done = 0  # compute ops so far
        self.held: dict[str, None] = {}  # slots taken by groups that may not stay
        self.under_way: Counter[str] = Counter()  # limited transfers, by kind
        self.kinds, self.microbatch_kinds, self.call_kinds = op_kinds(), microbatch_kinds(), call_kinds()
        self.groups = tracks_of(schedule, self.parts)
        self.edges, self.activations = EdgeCheck(schedule), ActivationCheck(schedule)

    @property
    def microbatch(self) -> int:
        """The one that runs."""
        return self.parts[max(self.part, 0)].microbatch

    def take(self, at: int, op: Op) -> Iterator[str]:
        """List what is wrong with this op, which then has happened."""
        if op.kind in COMPUTE_KINDS:
            yield from self._compute(op)
        elif op.kind in self.call_kinds:
            yield from self.activations.take(at, op, self.done)
        elif op.kind == "consensus":
            yield from self._consensus(at)
        elif op.kind in ("update", UPDATED):
            yield from (self._updated if op.kind == UPDATED else self._update)(op, self.groups[op.target])
        elif op.kind in ("free", "reshard"):
            yield from self._free(op, self.groups[op.target])
        elif op.kind not in STEP_KINDS:
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
        return self.edges.leftover() or self.activations.leftover() or (0, "")

    def _compute(self, op: Op) -> Iterator[str]:
        if self.done == len(self.due):
            yield "the program is over"
            return
        if op != self.due[self.done]:
            yield f"the program has '{self.due[self.done]}' here"
        if self.part + 1 < len(self.parts) and self.parts[self.part + 1].start == self.done:
            yield from self._part_over()
            self.part += 1
        part = self.parts[self.part]
        reads = part.needs(op)
        if part.local is not None:
            yield from self._local(op, part.local)
        yield from self.edges.read(self.done)
        yield from self.activations.compute(op, self.done)
        for name in dict.fromkeys((*part.reads.get(ROOT, ()), *reads)):
            yield from self._readable(name, op.target)
        for name in part.filled_by(op):
            yield from self._filled(self.groups[part.fills[name].gradient])
        for name in self.held:
            use = self.groups[name].next_use
            if use is None or use > self.horizons[self.done]:
                yield f"{name} must be free: no compute within prefetch={self.policy.prefetch} reads it"
        for name in reads:
            self.groups[name].passed += 1
        self.done += 1

    def _local(self, op: Op, local: Local) -> Iterator[str]:
        """Return what code between passes lacks."""
        infos = self.schedule.groups
        for name in [infos[g].name for g in local.gradients]:
            for problem in self._incomplete(name, self.groups[name]):
                yield f"'{op}' reads the gradient of {name}: {problem}"
        for name in [infos[g].name for g in local.updated]:
            yield from self._stale(name, self.groups[name], f"'{op}' reads {name}")

    def _filled(self, group: GroupProgress) -> Iterator[str]:
        """List what is wrong if a gradient is filled now."""
        for progress in group.path[:1]:
            if progress.under_way:
                yield f"{group.info.name}'s gradient is filled again while its {_since(progress)}"
        yield from self._replaced(group)

    def _replaced(self, group: GroupProgress) -> Iterator[str]:
        """Say which pending updates still need the gradient that the step before has left."""
        for name in group.readers:
            if self._updates_first(self.groups[name]) and self.groups[name].update != "over":
                yield f"{name}'s pending update needs the gradient that this one replaces"

    def _readable(self, name: str, unit: str) -> Iterator[str]:
        group = self.groups[name]
        if group.info.gathered and group.slot != "live":
            missing = {"free": "is not gathered", "coming": "was not waited for since its all-gather"}[group.slot]
            yield f"{unit} reads {name}, which {missing}"
        yield from self._stale(name, group, f"{unit} reads {name}")

    def _stale(self, name: str, group: GroupProgress, what: str) -> Iterator[str]:
        """List what is wrong if the parameters of a group are used now."""
        if self._updates_first(group):
            if group.update != "over":
                yield f"{what} before its pending update"
            if not group.shared:
                yield f"{what} before the ranges that other ranks updated are there"

    def _part_over(self) -> Iterator[str]:
        """Say which reductions a microbatch lacks that is over."""
        if self.part < 0:
            return
        part = self.parts[self.part]
        over = [fill for fill in part.fills.values() if fill.completes[part.microbatch] < part.end]
        for group in [self.groups[fill.gradient] for fill in over]:
            for progress in group.path:
                each, name = progress.transfer.row.each_microbatch, group.info.name
                if each and progress.started < self._times(group, progress, part.microbatch):
                    yield f"{name} had no {progress.transfer.kind} in microbatch {part.microbatch}"

    def _reduces(self, group: GroupProgress, microbatch: int) -> bool:
        fill = group.fill
        return fill.first <= microbatch <= fill.last and self.policy.reduces_in(microbatch, fill.last + 1)

    def _times(self, group: GroupProgress, progress: Progress, microbatch: int) -> int:
        """Return how often a transfer has been started when that of a microbatch has."""
        if not progress.transfer.row.each_microbatch:
            return 1
        if self.policy.accumulation == "full":
            return int(microbatch == group.fill.last)
        return microbatch - group.fill.first + 1

    def _transfer(self, at: int, op: Op, group: GroupProgress) -> Iterator[str]:
        row = started(op.kind) or awaited(op.kind)
        assert row is not None  # ``_shape`` knows all kinds
        if row.stage == "edge":
            yield from self.edges.take(at, op, self.done)
            return
        if row.stage == "read":
            yield from (self._gather(at, op, group) if row.name == op.kind else self._gathered(op, group))
            return
        progress = group.progress.get(row.name)
        if progress is None:
            yield f"{op.target} has no {row.name} in {'this' if self.schedule.train else 'an eval'} step"
        elif row.name != op.kind:
            yield from self._wait(op, group, progress)
        else:
            yield from self._start(op, group, progress)
            progress.started, progress.at = progress.started + 1, at
            self.under_way[row.name] += progress.limited

    def _start(self, op: Op, group: GroupProgress, progress: Progress) -> Iterator[str]:
        row, last = progress.transfer.row, group.fill.last
        microbatch = op.microbatch if row.each_microbatch else last
        if progress.under_way:
            yield f"{op.target}'s {_since(progress)}"
        if row.each_microbatch:
            if microbatch != self.microbatch:
                yield f"microbatch {self.microbatch} is running"
            if not group.fill.first <= microbatch <= last:
                yield f"{op.target}'s gradient is filled in microbatches {group.fill.first} to {last}"
            if not self._reduces(group, microbatch):
                yield f"gradients are reduced in microbatch {last} alone"
        if progress.started >= self._times(group, progress, microbatch):
            yield f"{row.name} of {op.target} was started at op {progress.at}"
        yield from self._unready(op.target, group, progress, microbatch)
        limit = max(self.policy.reduces + row.spare, 1)
        if row.stage == "gradient" and progress.limited and self.under_way[row.name] >= limit:
            beyond = f" allows {row.spare} more than that" if row.spare else ""
            yield f"{self.under_way[row.name]} {row.name} are under way; reduces={self.policy.reduces}{beyond}"

    def _unready(self, name: str, group: GroupProgress, progress: Progress, microbatch: int) -> Iterator[str]:
        """Say why what a transfer reads is not complete."""
        if progress.before is not None:
            if progress.before.over < self._times(group, progress.before, microbatch):
                yield f"{progress.before.transfer.kind} of {name} must be waited for before"
        elif progress.transfer.row.stage == "updated":
            if group.update != "over":
                yield f"{name} is sent before its update"
        else:
            completes = group.fill.completes[microbatch]
            if self.done <= completes:
                yield f"'{self.due[completes]}' must come before"
            yield from self._replaced(group)

    def _wait(self, op: Op, group: GroupProgress, progress: Progress) -> Iterator[str]:
        row = progress.transfer.row
        if not progress.under_way or progress.started != self._times(group, progress, op.microbatch):
            of = f" of microbatch {op.microbatch}" if row.each_microbatch else ""
            yield f"no {row.name} of {op.target}{of} is under way"
        progress.over = progress.started
        self.under_way[row.name] -= progress.limited

    def _gather(self, at: int, op: Op, group: GroupProgress) -> Iterator[str]:
        use = group.next_use
        made, number = group.made
        if made >= self.done:
            yield f"{op.target} is gathered before local {number} makes it"
        if group.info.transfer(op.kind) is None:
            yield f"{op.target} is resident: compute reads it where it lies"
        elif group.second != (op.kind == "regather"):
            yield f"{op.target} {'has' if group.second else 'has no'} secondary shards"
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

    def _gathered(self, op: Op, group: GroupProgress) -> Iterator[str]:
        if group.slot != "coming":
            yield f"no {op.kind[5:]} of {op.target} is under way"
        group.slot = "live"

    def _free(self, op: Op, group: GroupProgress) -> Iterator[str]:
        if group.slot != "live":
            yield f"{op.target} {'is still under way' if group.slot == 'coming' else 'is not gathered'}"
        later = group.info.transfer("regather") is not None and group.next_use is not None
        if later != (op.kind == "reshard"):
            yield f"{op.target} {'is' if later else 'is not'} gathered again from secondary shards"
        group.slot, group.second = "free", op.kind == "reshard"
        self.held.pop(op.target, None)

    def _updates_first(self, group: GroupProgress) -> bool:
        return group.updates and self.policy.update != "in_backward"

    def _update(self, op: Op, group: GroupProgress) -> Iterator[str]:
        last = group.fill.last
        if not group.updates:
            why = "has no pending update" if group.info.trainable else "is frozen"
            yield f"{op.target} {why if self.schedule.train else 'is not trained in an eval step'}"
        if group.update:
            yield f"{op.target} was updated before"
        if self.policy.update != "in_backward":
            if group.passed or group.gathered_at >= 0:
                yield f"{op.target} was gathered or read before its pending update"
        elif group.next_use is not None:
            yield f"{op.target} is read again after its update"
        elif group.path:
            yield from self._incomplete(op.target, group)
        elif self.done <= group.fill.completes[last]:
            yield f"{op.target} has no gradient of microbatch {last} yet"
        group.update = "under way" if self.policy.update == "beside" else "over"

    def _updated(self, op: Op, group: GroupProgress) -> Iterator[str]:
        if group.update != "under way":
            yield f"no update of {op.target} is under way"
        group.update = "over"

    def _incomplete(self, name: str, group: GroupProgress) -> Iterator[str]:
        """Return what of a gradient's path is not over."""
        for progress in group.path:
            if progress.over < self._times(group, progress, group.fill.last):
                yield f"{progress.transfer.kind} of {name} is not over"

    def _consensus(self, at: int) -> Iterator[str]:
        if not self.schedule.train:
            yield "an eval step ends without a consensus op"
        if at != len(self.schedule.ops) - 1:
            yield "consensus must be the last op"
        if self.done < len(self.due):
            yield f"the program is not over: '{self.due[self.done]}' is due"
        yield from self._part_over()
        for name, group in self.groups.items():
            yield from self._incomplete(name, group)
            if group.updates and group.update != "over":
                yield f"{name} was not updated"
            if not group.shared:
                yield f"{name}'s updated ranges are not there"


def _since(progress: Progress) -> str:
    return f"{progress.transfer.kind} since op {progress.at} is under way"


def _shape(op: Op, at: int, run: _Run) -> str:
    """List what is wrong with an op by itself."""
    if op.kind not in run.kinds:
        return f"{op.kind!r} is none of {', '.join(sorted(run.kinds))}"
    if (op.kind == "handshake") != (at == 0):
        return "handshake must be the first op, and no other"
    of_call = op.kind in run.call_kinds
    known = run.schedule.stages.reads if of_call else run.groups if op.kind not in STEP_KINDS | {LOCAL} else ("",)
    if op.target not in known:
        return f"{op.target!r} is not a {'unit' if of_call else 'group'} of this schedule"
    if op.index and not of_call and op.kind != LOCAL or op.microbatch and op.kind not in run.microbatch_kinds:
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
    rows = enumerate(op_lines(schedule.ops, len(schedule.stages.microbatches)))
    shown = [f"{'->' if i == at else '  '} {line}" for i, line in rows if abs(i - at) <= CONTEXT]
    return schedule_refusals.broken_schedule(problem, shown)
