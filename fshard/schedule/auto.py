"""Choosing a policy: candidates are built, their memory is known, their time is simulated, and the table is kept.

Automatic choice by a cost model over a small set of plans, as Alpa (Zheng et al., 2022) and Galvatron (Miao et al.,
2023) do for layouts, here for schedules alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule import schedule_refusals
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask, candidates
from fshard.schedule.costs import Costs, Link
from fshard.schedule.footprint import Footprint, Need, footprint
from fshard.schedule.machines import Speed, hosted_seconds, unit_seconds
from fshard.schedule.policy import UPDATES, Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation, simulate, time_text
from fshard.schedule.transfers import item_words

TIE = 1.01
"""Times closer than this are equal: the model is no better. Of those the least memory wins."""

LARGEST = 4
"""Items that an error about memory names."""


@dataclass(frozen=True)
class Auto:
    """``schedule=fs.Auto(memory=...)``: pick the policy whose step is fastest among those that fit.

    Args:
        memory: bytes that a step may hold on a rank beside parameter shards and optimizer state, activations
            included; None for no limit.
        compute: floating-point operations a second of one rank. None: measured at the first step.
        wire: bytes a second that one rank can send. None: measured at the first step.
        copies: bytes a second from a device to the memory of its host, and as many back. None: measured at the first
            step.
        latency: seconds from the issue of a collective to its first byte.
        update: when updates happen, as in ``fs.Policy``. It is never chosen: it decides whether steps are atomic.

    Raises:
        PlanError: a value is not a positive amount; all such values are listed.

    >>> fs.Auto(memory=2**30, compute=50e9, wire=125e6).update
    'deferred'
    """

    memory: int | None = None
    compute: float | None = None
    wire: float | None = None
    latency: float = 0.0
    update: str = "deferred"
    copies: float | None = None

    def __post_init__(self) -> None:
        problems = []
        for name in ("memory", "compute", "wire", "copies"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                problems.append(f"{name}={value!r} is not a positive number")
        if not isinstance(self.latency, int | float) or not 0 <= self.latency < math.inf:
            problems.append(f"latency={self.latency!r} is not a number of seconds")
        if self.update not in UPDATES:
            problems.append(f"update={self.update!r} is none of {', '.join(map(repr, UPDATES))}")
        if problems:
            raise schedule_refusals.bad_policy(problems)


@dataclass(frozen=True)
class Rates:
    """Rates by which candidates are ranked: operations a second, bytes a second, seconds.

    ``copies`` are bytes a second between a device and its host.
    """

    compute: float
    wire: float
    latency: float = 0.0
    copies: float = math.inf

    def costs(self, task: "PolicyTask") -> Costs:
        """Return what the ops of a task would cost."""
        speed = Speed(self.compute, math.inf, self.compute)
        copies = hosted_seconds(task.stages, task.needs, self.copies)
        return Costs(unit_seconds(task.stages, task.needs, speed), Link(self.wire, self.latency), copies=copies)

    def __str__(self) -> str:
        copies = f", {self.copies / 1e6:.4g} MB/s to the host" if math.isfinite(self.copies) else ""
        words = (
            f"{self.compute / 1e9:.4g} GFLOP/s, {self.wire / 1e6:.4g} MB/s a rank, latency {time_text(self.latency)}"
        )
        return words + copies


@dataclass(frozen=True)
class Candidate:
    """One policy with what it would hold and take.

    ``again`` are the units that are computed again; with ``hosted``, those that keep their activations on the host.
    """

    policy: Policy
    memory: Footprint
    seconds: float
    exposed: float
    again: tuple[str, ...] = ()
    hosted: bool = False

    @property
    def words(self) -> str:
        """The policy, and what is computed again or offloaded."""
        if not self.again:
            return str(self.policy)
        units = self.again[0] if len(self.again) == 1 else f"{self.again[0]} to {self.again[-1]}"
        return f"{self.policy} {'offload' if self.hosted else 'remat'}={len(self.again)} units, {units}"


@dataclass(frozen=True)
class Choice:
    """The choice of ``schedule="auto"``, and from what. ``print`` it.

    Attributes:
        schedule: of the chosen policy.
        candidates: all that were tried, the fastest first.
        rates: what simulated times stand on: rates, or measured costs.
        budget: the limit on memory, in bytes.
        task: what the policy was chosen for. ``task.again`` are the units that are computed again, or with
            ``task.hosted`` keep their activations on the host: none, unless no policy fits without.
        measured: seconds of a step, by policy, of those that were timed against each other. Empty where the choice is
            by simulated times alone.
        settled: whether it stays. If not, steps of the run are still being timed, and not all run under this policy.

    Example::

        step = fs.make_train_step(loss_fn, opt, plan, schedule=fs.Auto(memory=8 * 2**30))
        ...  # after the first step
        print(step.trace(batch).choice)  # the policies that were tried, with their seconds and bytes
    """

    schedule: Schedule = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    rates: Rates | Costs
    budget: int | None
    task: PolicyTask = field(repr=False)
    measured: Mapping[Policy, float] = field(default_factory=dict, repr=False)
    settled: bool = True

    @property
    def policy(self) -> Policy:
        """The one chosen."""
        return self.schedule.policy

    @property
    def chosen(self) -> Candidate:
        """The same, with what it would hold and take."""
        mine = self.policy, self.task.again, self.task.hosted
        return next(each for each in self.candidates if (each.policy, each.again, each.hosted) == mine)

    @property
    def reason(self) -> str:
        """Return what decided, and by which costs."""
        limit = f"at most {size_text(self.budget)}" if self.budget is not None else "no limit on memory"
        among = f"the least memory among the fastest (within {TIE - 1:.0%})"
        if not self.settled:
            among = f"so far, since steps are still being timed, {among} by foresight"
        elif self.measured:
            among += f" of {len(self.measured)} policies that were timed in turns"
        return f"{among}, {limit}; {self.rates}"

    def __str__(self) -> str:
        head = f"{'step':>12} {'exposed':>12} {'memory':>10}  policy"
        rows = [f"chose {self.chosen.words}", self.reason, f"{'measured':>12} {head}" if self.measured else head]
        for each in self.candidates:
            took = f"{self._took(each):>12} " if self.measured else ""
            mark = self._mark(each)
            rows.append(
                f"{took}{time_text(each.seconds):>12} {time_text(each.exposed):>12} "
                f"{size_text(each.memory.peak_bytes):>10}  {each.words}{mark and f' {mark}'}"
            )
        return "\n".join(rows)

    def _took(self, candidate: Candidate) -> str:
        """Return what its steps took, if they were timed."""
        same = (candidate.again, candidate.hosted) == (self.task.again, self.task.hosted)
        timed = same and candidate.policy in self.measured
        return time_text(self.measured[candidate.policy]) if timed else ""

    def _mark(self, candidate: Candidate) -> str:
        """Return what is special about a candidate."""
        over = self.budget is not None and candidate.memory.peak_bytes > self.budget
        return "<- chosen" if candidate is self.chosen else "(over the limit)" if over else ""

    def _repr_html_(self) -> str:
        slowest = max(each.seconds for each in self.candidates)
        largest = max(each.memory.peak_bytes for each in self.candidates)
        rows = []
        for each in self.candidates:
            step = [("busy", each.seconds - each.exposed), ("exposed", each.exposed)]
            memory = markup.bar([("memory", each.memory.peak_bytes)], largest, 120)
            size, mark = size_text(each.memory.peak_bytes), self._mark(each).strip("<- ()")
            bar = markup.bar(step, slowest, 160)
            rows.append([each.words, mark, self._took(each), time_text(each.seconds), bar, size, memory])
        head = ["policy", "", "measured" if self.measured else "", "step", "", "memory", ""]
        return markup.shown(self.reason, markup.table(head, rows, 2), markup.legend(["busy", "exposed"]))


def nothing_else() -> Sequence[PolicyTask]:
    """No other task."""
    return ()


def choose(
    task: PolicyTask, auto: Auto, rates: Rates | Costs, others: Callable[[], Sequence[PolicyTask]] = nothing_else
) -> Choice:
    """The policy of the fastest simulated step that fits, and the table. A function of its arguments alone.

    Without ``task.needs``, activations count as nothing, and so does compute unless costs are given. If no candidate
    fits, the error names the least memory, where it is needed, and what needs it.

    Args:
        task: what is run.
        auto: what was asked for.
        rates: what ops cost, or what that is computed from.
        others: the same with units computed again or offloaded. They are asked for where nothing fits.
    """
    found = _every(task, auto, rates)
    if not _fitting(found, auto):
        found += [each for other in others() for each in _every(other, auto, rates)]
    fits = _fitting(found, auto)
    if not fits:
        least, schedule, _ = min(found, key=lambda each: each[0].memory.peak_bytes)
        assert auto.memory is not None
        raise schedule_refusals.memory_too_small(
            auto.memory, str(least.memory), least.words, _largest(schedule, least.memory)
        )
    fastest = min(each.seconds for each, _, _ in fits)
    close = [each for each in fits if each[0].seconds <= TIE * fastest]
    _, schedule, chosen = min(close, key=lambda each: (each[0].memory.peak_bytes, each[0].seconds))
    order = sorted((each for each, _, _ in found), key=lambda each: (each.seconds, each.memory.peak_bytes))
    return Choice(schedule, tuple(order), rates, auto.memory, chosen)


Tried = tuple[Candidate, Schedule, PolicyTask]


def _every(task: PolicyTask, auto: Auto, rates: Rates | Costs) -> list[Tried]:
    """All candidates of a task."""
    costs = rates.costs(task) if isinstance(rates, Rates) else rates
    return [(*tried(task, policy, costs), task) for policy in candidates(task, auto.update)]


def _fitting(found: Sequence[Tried], auto: Auto) -> list[Tried]:
    """Those within the limit on memory."""
    return [each for each in found if auto.memory is None or each[0].memory.peak_bytes <= auto.memory]


def tried(task: PolicyTask, policy: Policy, costs: Costs) -> tuple[Candidate, Schedule]:
    """Return what a policy would hold and take, and its schedule."""
    run = timed(task, policy, costs)
    return weighed(task, run), run.schedule


def timed(task: PolicyTask, policy: Policy, costs: Costs, make: Callable[..., Schedule] = build) -> Simulation:
    """Return what a policy would take, with a schedule that ``make`` makes, as ``build`` does."""
    schedule = make(task.program, task.under(policy).groups, policy, task.accumulate, task.train)
    kinds = {op.kind for op in schedule}
    return simulate(schedule, costs.only(kinds))


def weighed(task: PolicyTask, run: Simulation) -> Candidate:
    """Return what a policy that was timed would hold, too."""
    memory = footprint(run.schedule, task.needs or [Need(0, 0, 0)], task.graphs)
    return Candidate(run.schedule.policy, memory, run.seconds, run.exposed, task.again, task.hosted)


def _largest(schedule: Schedule, peak: Footprint) -> list[str]:
    """The largest items in memory at the peak."""
    memory = schedule.memory
    alive = [
        (size, item)
        for item, size in memory.sizes.items()
        if any(first <= peak.op <= last for first, last in memory.lifetimes[item])
    ]
    largest = sorted(alive, key=lambda pair: (-pair[0], pair[1]))[:LARGEST]
    words, rows = item_words(), [(*item.partition(":")[::2], size) for size, item in largest]
    return [f"{name}: {words[kind]}, {size_text(size)}" for kind, name, size in rows]
