"""Choosing the order of a pipeline: those that its stages can run in are built, weighed, simulated, and then timed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fshard.errors import PlanError, ScheduleError
from fshard.pipeline.named_orders import fitting_orders
from fshard.pipeline.pipeline_simulation import simulate_together
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.pipeline.staged_task import PositionForecast, StagedTask
from fshard.schedule import schedule_refusals
from fshard.schedule.auto import TIE, Auto, Candidate, Choice, Rates
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.contest import MOST, WORTH, Contender
from fshard.schedule.costs import Costs, Link
from fshard.schedule.footprint import Footprint
from fshard.schedule.machines import Speed, unit_seconds
from fshard.schedule.policy import Policy
from fshard.sharding.stage_table import StageTable


@dataclass(frozen=True)
class TriedOrder:
    """An order that was tried.

    Attributes:
        candidate: its policy, its simulated time, and the memory of the position that needs most.
        schedules: of all positions.
        footprints: by position, what its ranks hold beside their state.
    """

    candidate: Candidate
    schedules: PipelineSchedules
    footprints: tuple[Footprint, ...]

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.candidate.policy

    @property
    def kind(self) -> tuple[str, str]:
        """The order, and how gradients are added up."""
        return self.policy.pipeline, self.policy.accumulation


@dataclass(frozen=True)
class StagedOptions:
    """The orders that a program can run in, as they were tried. All ranks have the same ones.

    Attributes:
        task: what was tried.
        auto: what was asked for.
        rates: by which steps were simulated.
        tried: the orders.
    """

    task: StagedTask
    auto: Auto
    rates: Rates
    tried: tuple[TriedOrder, ...]

    @classmethod
    def of(cls, task: StagedTask, auto: Auto, rates: Rates) -> "StagedOptions":
        """Try all orders. A function of its arguments alone, so that ranks agree.

        Raises:
            PlanError, ScheduleError: no order can be.
        """
        found, refused = list[TriedOrder](), list[Exception]()
        whole = task.known[0][0].whole
        assert whole is not None and whole.stages is not None
        for policy in policies(orders_of(whole.stages), auto.update, task.programs.train, _full(task)):
            try:
                found.append(_tried(task, policy, rates))
            except (PlanError, ScheduleError) as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return cls(task, auto, rates, tuple(found))

    @property
    def choice(self) -> Choice:
        """The fastest order that fits, of those that tie the one that holds least, and the table.

        Raises:
            PlanError: none fits into the memory that was given.
        """
        limit, found = self.auto.memory, self.tried
        fits = self._fitting(math.inf)
        if not fits:
            least = min(found, key=lambda each: each.candidate.memory.peak_bytes).candidate
            assert limit is not None
            raise schedule_refusals.memory_too_small(limit, str(least.memory), least.words, [])
        fastest = min(each.candidate.seconds for each in fits)
        close = [each for each in fits if each.candidate.seconds <= TIE * fastest]
        best = min(close, key=lambda each: (each.candidate.memory.peak_bytes, each.candidate.seconds))
        order = sorted((each.candidate for each in found), key=lambda each: (each.seconds, each.memory.peak_bytes))
        task = self.task
        own, needs = best.schedules.ranks[task.position], task.measured[task.position, _parted(task, best.policy)].needs
        known = PolicyTask(task.staged.trace.program, task.programs.infos, needs, task.programs.accumulate)
        return Choice(own, tuple(order), self.rates, limit, known)

    def contenders(self, choice: Choice, room: int | None) -> tuple[Contender, ...]:
        """The orders to time: the chosen one, and the foreseen best of each other name and way to sum gradients.

        Args:
            choice: by foresight.
            room: bytes that a rank may hold where there are fewest; None if that is not known.
        """
        limit = min([each for each in (choice.budget, room) if each is not None], default=math.inf)
        fits = sorted(self._fitting(limit), key=lambda each: each.candidate.seconds)
        taken = [each for each in self.tried if each.policy == choice.policy]
        kinds = {each.kind for each in taken}
        for each in fits:
            slow = each.candidate.seconds > WORTH * fits[0].candidate.seconds
            if each.kind not in kinds and not slow and len(taken) < MOST and _held([*taken, each]) <= limit:
                kinds.add(each.kind)
                taken.append(each)
        return tuple([Contender(each.candidate, each.schedules.ranks[self.task.position]) for each in taken])

    def _fitting(self, limit: float) -> list[TriedOrder]:
        """Those within the limits on memory."""
        most = min(limit, math.inf if self.auto.memory is None else self.auto.memory)
        return [each for each in self.tried if each.candidate.memory.peak_bytes <= most]


def orders_of(table: StageTable) -> list[str]:
    """The names of the orders in which stages can run that lie so."""
    ranks = max(table.homes) + 1
    loop = table.homes == tuple([stage % ranks for stage in range(len(table.homes))])
    return fitting_orders(len(table.homes) // ranks, "loop" if loop else "v")


def policies(
    orders: Sequence[str], update: str = "deferred", train: bool = True, full: bool = True
) -> Iterator[Policy]:
    """The policies that are tried with some orders.

    Args:
        orders: their names.
        update: when updates happen.
        train: whether there is a backward; if not, one order has all forwards.
        full: whether whole gradients may be added up over microbatches.

    >>> [str(policy) for policy in policies(["gpipe"], train=False)]
    ['prefetch=2 reduces=2 reshard=true update=deferred', 'prefetch=2 reduces=2 reshard=false update=deferred']
    """
    for order in orders if train else [""]:
        for accumulation in ("sharded", "full") if train and full else ("sharded",):
            for reshard in (True, False):
                yield Policy(pipeline=order, accumulation=accumulation, reshard=reshard, update=update)


def _full(task: StagedTask) -> bool:
    """Tell whether whole gradients may be added up over microbatches: in the dtype in which they are reduced."""
    return all(group.reduce_dtype == group.dtype for plan, _ in task.known for group in plan.groups)


def _tried(task: StagedTask, policy: Policy, rates: Rates) -> TriedOrder:
    """An order with what it holds and takes."""
    schedules, found = task.under(policy)
    costs = _costs(found, rates)
    run = simulate_together(schedules.ranks, costs.only({op.kind for one in schedules.ranks for op in one}))
    most = max((one.footprint for one in found), key=lambda each: each.peak_bytes)
    waits = sum(sum(each.values()) for each in run.exposed) / len(run.ranks)
    candidate = Candidate(policy, most, run.seconds, waits)
    return TriedOrder(candidate, schedules, tuple([one.footprint for one in found]))


def _costs(found: Sequence[PositionForecast], rates: Rates) -> Costs:
    """Costs of the ops of all positions."""
    speed, seconds = Speed(rates.compute, math.inf, rates.compute), dict[tuple[str, str], float]()
    for one in found:
        seconds |= unit_seconds(one.program.step, one.needs.needs, speed)
    return Costs(seconds, Link(rates.wire, rates.latency))


def _parted(task: StagedTask, policy: Policy) -> bool:
    """Tell whether an order has backwards in two parts."""
    order = task.order(policy, task.programs.accumulate)
    return any(action.kind == "I" for lane in order.ranks for action in lane)


def _held(tried: Sequence[TriedOrder]) -> int:
    """The most bytes that a rank holds while its steps under some orders share the largest arena."""
    by_position = zip(*[each.footprints for each in tried], strict=True)
    rows: list[list[tuple[int, int]]] = [
        [(one.peak_bytes - one.arena_bytes, one.arena_bytes) for one in row] for row in by_position
    ]
    return max(max(beside for beside, _ in row) + max(arena for _, arena in row) for row in rows)
