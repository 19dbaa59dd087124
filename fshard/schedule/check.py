"""Checking a schedule: an abstract interpreter that runs the ops on nothing but their rules.

It knows what the program, the groups and the policy demand, and takes nothing from how schedules are built,
so that a schedule from anywhere (built, parsed, written by hand) is held to the same rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fshard.schedule.ops import KINDS, MICROBATCH_KINDS, ROOT, STEP_KINDS, UNIT_KINDS, Op, Program
from fshard.schedule.schedule import Schedule
from fshard.schedule.sweep import broken, check_memory


def check(schedule: Schedule) -> None:
    """Run the schedule's ops on nothing, and see that each finds what it needs.

    It holds that the compute ops are the program's, in order; that compute reads groups that are there,
    waited for and up to date; that slots are gathered, waited for and freed in turn, at most ``prefetch``
    computes ahead, and held no longer than the policy says; that each gradient is reduced once a microbatch,
    after its last reader, with at most ``reduces`` in flight, and collected once before its range is filled
    again; that shards are summed over replicas once, when they hold all microbatches, with at most
    ``reduces`` more sums in flight, and waited for; that gradients which are updated with in host memory go there once,
    when they are complete, and as many at a time; that each update happens once and where the policy says, and
    what it changed of a shard that others hold too reaches them before anybody reads it; that ranges of the
    arena which are alive together are disjoint; and that nothing is left at the end.

    Raises:
        ScheduleError: the first op that breaks a rule, shown among its neighbours.
    """
    run = _Run(schedule)
    for at, op in enumerate(schedule.ops):
        problem = _shape(op, at, run) or next(run.take(at, op), None)
        if problem:
            raise broken(schedule, at, problem)
    at, problem = run.leftover()
    if problem:
        raise broken(schedule, at, problem)
    check_memory(schedule)


@dataclass
class _Group:
    """What has happened to one group so far."""

    uses: list[int]  # positions, among the compute ops, of those that read it
    filled: tuple[int, int]  # the same, within one microbatch: first and last op that fills its gradient
    kept: bool
    passed: int = 0
    slot: str = "free"  # or "coming", "live"
    gathered_at: int = -1
    updated_at: int = -1
    reduced: int = 0  # microbatches
    collected: int = 0
    reduced_at: int = -1
    summed_at: int = -1
    totalled: bool = False
    offloaded_at: int = -1
    stored: bool = False
    spread_at: int = -1
    joined: bool = False

    @property
    def next_use(self) -> int | None:
        """Position of the next compute op that reads it."""
        return self.uses[self.passed] if self.passed < len(self.uses) else None


class _Run:
    """The interpreter: one method an op, each yielding what is wrong with it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.policy = schedule, schedule.policy
        self.reads = schedule.program.reads
        self.infos = {group.name: group for group in schedule.groups}
        self.names = {unit: [schedule.groups[i].name for i in ids] for unit, ids in self.reads.items()}
        self.expected = list(_expected(schedule.program))
        self.total = len(self.expected) * schedule.accumulate
        self.done = 0  # compute ops so far
        self.groups = self._fresh()
        self.held: dict[str, None] = {}  # slots taken by groups that may not stay
        self.root = self.names[ROOT]
        self.verbs = {
            "update": self._update,
            "gather": self._gather,
            "wait": self._wait,
            "free": self._free,
            "reduce": self._reduce,
            "collect": self._collect,
            "sum": self._sum,
            "total": self._total,
            "spread": self._spread,
            "join": self._join,
            "offload": self._offload,
            "stored": self._stored,
        }
        self.summing = self.leaving = 0
        self.in_flight = 0
        self.reductions = 0  # of the microbatch that runs
        self.reduced_groups = sum(g.trainable and g.reduced for g in schedule.groups) if schedule.train else 0

    def _fresh(self) -> dict[str, _Group]:
        once: dict[str, list[int]] = {name: [] for name in self.infos}
        for position, (_, unit, _) in enumerate(self.expected):
            for name in self.names[unit]:
                once[name].append(position)
        length = len(self.expected)
        kept = {self.schedule.groups[g].name for g in self.policy.kept(self.schedule.program)}
        groups = {}
        for name, positions in once.items():
            uses = [m * length + p for m in range(self.schedule.accumulate) for p in positions]
            fills = [p for p in positions if self.expected[p][0] == "backward"]
            filled = (fills[0], fills[-1]) if fills else (length, length - 1)
            groups[name] = _Group(uses, filled, name in kept)
        return groups

    def _horizon(self) -> int:
        """The last compute for which a group may hold its slot while the one that is due runs.

        From ``prefetch`` computes before the end of a forward or of a backward on, it is that of the first call
        after it.
        """
        ahead, length = self.policy.prefetch, len(self.expected)
        horizon = self.done + ahead
        calls = len(self.schedule.program.forward)
        if calls and self.schedule.program.backward:
            start = self.done - self.done % length
            turns = [(m + calls, m + calls + 1) for m in (start, start + length)]
            turns += [(m - 2, m + 1) for m in (start, start + length)]
            horizon = max([horizon, *(first + ahead for last, first in turns if last - ahead < self.done <= first)])
        return horizon

    @property
    def microbatch(self) -> int:
        """The one that runs; between the last op of one and the first of the next, still the former."""
        return max(self.done - 1, 0) // len(self.expected)

    def take(self, at: int, op: Op) -> Iterator[str]:
        """What is wrong with this op, which then has happened."""
        if op.kind in UNIT_KINDS:
            yield from self._compute(op)
        elif op.kind == "commit":
            yield from self._commit(at)
        elif op.kind != "agree":
            yield from self.verbs[op.kind](at, op, self.groups[op.target])

    def leftover(self) -> tuple[int, str]:
        """The op that is to blame, and how, if something is missing at the end."""
        last = len(self.schedule.ops) - 1
        if not self.schedule.ops:
            return 0, "there are no ops at all: agree must be the first"
        if self.done < self.total:
            return last, f"the program is not over: '{self._due()}' is due"
        if self.schedule.train and self.schedule.ops[-1].kind != "commit":
            return last, "commit must be the last op of a train step"
        for name, group in self.groups.items():
            if group.slot != "free":
                return group.gathered_at, f"{name} is gathered here and never freed"
            if group.collected < group.reduced:
                return group.reduced_at, f"{name} is reduced here and never collected"
        return 0, ""

    def _due(self) -> Op:
        microbatch, position = divmod(self.done, len(self.expected))
        return Op(*self.expected[position], microbatch)

    def _compute(self, op: Op) -> Iterator[str]:
        if self.done == self.total:
            yield "the program is over"
            return
        due = self._due()
        if op != due:
            yield f"the program has '{due}' here"
        if self.done % len(self.expected) == 0:
            yield from self._microbatch_over()
        reads = self.names[op.target]
        for name in dict.fromkeys((*self.root, *reads)):
            yield from self._readable(name, op.target)
        for name in reads if op.kind == "backward" else ():
            if self.groups[name].reduced > self.groups[name].collected:
                since = self.groups[name].reduced_at
                yield f"{name}'s gradient is filled again while its reduction since op {since} is in flight"
        horizon = self._horizon()
        for name in self.held:
            use = self.groups[name].next_use
            if use is None or use > horizon:
                yield f"{name} must be free: no compute within prefetch={self.policy.prefetch} reads it"
        for name in reads:
            self.groups[name].passed += 1
        self.done += 1

    def _readable(self, name: str, unit: str) -> Iterator[str]:
        info, group = self.infos[name], self.groups[name]
        if info.gathered and group.slot != "live":
            missing = {"free": "is not gathered", "coming": "was not waited for since its gather"}[group.slot]
            yield f"{unit} reads {name}, which {missing}"
        if self._updates_first(name) and group.updated_at < 0:
            yield f"{unit} reads {name} before its pending update"
        if self._updates_first(name) and info.spread and not group.joined:
            yield f"{unit} reads {name} before the ranges that other ranks updated are there"

    def _microbatch_over(self) -> Iterator[str]:
        if self.done and self._reduces(self.microbatch) and self.reductions < self.reduced_groups:
            yield f"{self._unreduced(self.microbatch)} was not reduced in microbatch {self.microbatch}"
        self.reductions = 0

    def _reduces(self, microbatch: int) -> bool:
        return self.policy.reduces_in(microbatch, self.schedule.accumulate)

    def _unreduced(self, microbatch: int) -> str:
        return next(
            name
            for name, info in self.infos.items()
            if info.trainable and info.reduced and self.groups[name].reduced <= microbatch
        )

    def _gather(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        use = group.next_use
        if not self.infos[op.target].gathered:
            yield f"{op.target} is resident: compute reads it where it lies"
        if group.slot != "free":
            yield f"{op.target} holds its slot since op {group.gathered_at}"
        if use is None:
            yield f"no compute reads {op.target} any more"
        elif use > self.done + self.policy.prefetch:
            yield f"{op.target} is read {use - self.done} computes ahead; prefetch={self.policy.prefetch}"
        if group.kept and group.gathered_at >= 0:
            yield f"{op.target} stays for the step once gathered; it was gathered at op {group.gathered_at}"
        if self._updates_first(op.target) and group.updated_at < 0:
            yield f"{op.target} is gathered before its pending update"
        if self._updates_first(op.target) and self.infos[op.target].spread and not group.joined:
            yield f"{op.target} is gathered before the ranges that other ranks updated are there"
        group.slot, group.gathered_at = "coming", at
        if not group.kept:
            self.held[op.target] = None

    def _wait(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.slot != "coming":
            yield f"no gather of {op.target} is in flight"
        group.slot = "live"

    def _free(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.slot != "live":
            yield f"{op.target} {'is still in flight' if group.slot == 'coming' else 'is not gathered'}"
        group.slot = "free"
        self.held.pop(op.target, None)

    def _reduce(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        info = self.infos[op.target]
        if not (self.schedule.train and info.trainable and info.reduced):
            yield f"{op.target} has no gradient to reduce"
        if op.microbatch != self.microbatch:
            yield f"microbatch {self.microbatch} is running"
        if not self._reduces(op.microbatch):
            yield f"gradients are reduced in microbatch {self.schedule.accumulate - 1} alone"
        if group.reduced > op.microbatch:
            yield f"{op.target} was reduced at op {group.reduced_at}"
        if group.reduced > group.collected:
            yield f"the reduction of {op.target} since op {group.reduced_at} is in flight"
        last = op.microbatch * len(self.expected) + group.filled[1]
        if self.done <= last:
            yield f"{Op(*self.expected[group.filled[1]])} of this microbatch must come before"
        if self.in_flight >= self.policy.reduces and not info.local:
            yield f"{self.in_flight} reductions are in flight; reduces={self.policy.reduces}"
        if self._updates_first(op.target) and group.updated_at < 0:
            yield f"{op.target}'s pending update needs the gradient that this one replaces"
        group.reduced, group.reduced_at = op.microbatch + 1, at
        self.in_flight += not info.local
        self.reductions += 1

    def _collect(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.reduced == group.collected or group.reduced != op.microbatch + 1:
            yield f"no reduction of {op.target} of microbatch {op.microbatch} is in flight"
        group.collected = group.reduced
        self.in_flight -= not self.infos[op.target].local

    def _sum(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        last = self.schedule.accumulate - 1
        if not (self.schedule.train and self.infos[op.target].summed):
            yield f"{op.target} has no replicas to be summed over"
        if group.collected <= last:
            yield f"{op.target} has not collected its gradient of microbatch {last}"
        if group.summed_at >= 0:
            yield f"{op.target} was summed at op {group.summed_at}"
        if self.summing > self.policy.reduces:
            yield f"{self.summing} sums are in flight; reduces={self.policy.reduces} allows one more than that"
        group.summed_at = at
        self.summing += 1

    def _total(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.summed_at < 0 or group.totalled:
            yield f"no sum of {op.target} is in flight"
        group.totalled = True
        self.summing -= 1

    def _offload(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        info, last = self.infos[op.target], self.schedule.accumulate - 1
        if not (self.schedule.train and info.offloaded):
            yield f"{op.target} is updated on the device"
        if group.collected <= last or info.summed and not group.totalled:
            yield f"the gradient of {op.target} is not complete"
        if group.offloaded_at >= 0:
            yield f"{op.target} was sent to the host at op {group.offloaded_at}"
        if self.leaving > self.policy.reduces:
            yield f"{self.leaving} gradients are on their way; reduces={self.policy.reduces} allows one more than that"
        group.offloaded_at = at
        self.leaving += 1

    def _stored(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.offloaded_at < 0 or group.stored:
            yield f"no gradient of {op.target} is on its way to the host"
        group.stored = True
        self.leaving -= 1

    def _spread(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if not (self.schedule.train and self.infos[op.target].spread):
            yield f"{op.target} is updated by every rank that holds it"
        if group.updated_at < 0:
            yield f"{op.target} is sent before its update"
        if group.spread_at >= 0:
            yield f"{op.target} was sent at op {group.spread_at}"
        group.spread_at = at

    def _join(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        if group.spread_at < 0 or group.joined:
            yield f"no ranges of {op.target} are under way"
        group.joined = True

    def _updates_first(self, name: str) -> bool:
        return self.schedule.train and self.infos[name].trainable and self.policy.update == "deferred"

    def _update(self, at: int, op: Op, group: _Group) -> Iterator[str]:
        info, last = self.infos[op.target], self.schedule.accumulate - 1
        if not (self.schedule.train and info.trainable):
            yield f"{op.target} is {'frozen' if self.schedule.train else 'not trained in an eval step'}"
        if group.updated_at >= 0:
            yield f"{op.target} was updated at op {group.updated_at}"
        if self.policy.update == "deferred":
            if group.passed or group.gathered_at >= 0:
                yield f"{op.target} was gathered or read before its pending update"
        elif group.next_use is not None:
            yield f"{op.target} is read again after its update"
        elif info.reduced and group.collected <= last:
            yield f"{op.target} has not collected its gradient of microbatch {last}"
        elif info.summed and not group.totalled:
            yield f"{op.target} has no total over its replicas yet"
        elif info.offloaded and not group.stored:
            yield f"{op.target} has no gradient in host memory yet"
        elif self.done <= last * len(self.expected) + group.filled[1]:
            yield f"{op.target} has no gradient of microbatch {last} yet"
        group.updated_at = at

    def _commit(self, at: int) -> Iterator[str]:
        if not self.schedule.train:
            yield "an eval step has nothing to commit"
        if at != len(self.schedule.ops) - 1:
            yield "commit must be the last op"
        if self.done < self.total:
            yield f"the program is not over: '{self._due()}' is due"
        yield from self._microbatch_over()
        for name, group in self.groups.items():
            if group.reduced > group.collected:
                yield f"{name}'s reduction since op {group.reduced_at} was not collected"
            if self.infos[name].summed and not group.totalled:
                yield f"{name} has no total over its replicas"
            if self.infos[name].offloaded and not group.stored:
                yield f"{name} has no gradient in host memory"
            if self.infos[name].trainable and group.updated_at < 0:
                yield f"{name} was not updated"
            if self.infos[name].spread and not group.joined:
                yield f"{name}'s updated ranges are not there"


def _expected(program: Program) -> Iterator[tuple[str, str, int]]:
    yield "forward", ROOT, 0
    yield from (("forward", call.unit, call.index) for call in program.forward)
    yield from (("backward", call.unit, call.index) for call in program.backward)
    yield "backward", ROOT, 0


def _shape(op: Op, at: int, run: _Run) -> str:
    """What is wrong with an op by itself."""
    if op.kind not in KINDS:
        return f"{op.kind!r} is none of {', '.join(sorted(KINDS))}"
    if (op.kind == "agree") != (at == 0):
        return "agree must be the first op, and no other"
    known = run.names if op.kind in UNIT_KINDS else ("",) if op.kind in STEP_KINDS else run.infos
    if op.target not in known:
        return f"{op.target!r} is no {'unit' if op.kind in UNIT_KINDS else 'group'} of this schedule"
    if op.index and op.kind not in UNIT_KINDS or op.microbatch and op.kind not in MICROBATCH_KINDS:
        return f"{op.kind} has no {'call index' if op.index else 'microbatch'}"
    return ""
