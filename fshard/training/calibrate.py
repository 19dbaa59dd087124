"""Calibration: a few timed steps, and the costs that they had."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import ceil, inf
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from fshard import errors
from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.runtime.execution.timed import Stopwatch
from fshard.runtime.steps import Latest
from fshard.runtime.steps.calibrate import TimedOps, fitted_by_all, steps_in
from fshard.schedule.costs import Costs
from fshard.schedule.schedule import Schedule
from fshard.state.train_state import TrainState

WARM = 2
"""Steps before those that are measured: the first allocates, compares unit graphs, and opens connections."""


SPAN, MOST = 3.0, 300
"""Seconds of measured steps, if steps are so short that ``rounds`` take less, and the most steps for that."""

TURNS = 8
"""Turns of the two kinds of steps, each after a step that does not count."""


class TimedStep(Protocol):
    """A step whose ops are timed."""

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Make a step."""

    @property
    def latest(self) -> Latest:
        """Return what the latest run did, and when."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest run."""


@dataclass
class StepTimes:
    """Steps of one rank: the times of their ops, the seconds of the host around these, and of the steps."""

    watches: list[Stopwatch] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def take(self, step: TimedStep, state: TrainState, batch: Any, count: int) -> TrainState:
        """Make some steps, and return the state after them."""
        for _ in range(count):
            begun = perf_counter()
            state, _metrics = step(state, batch)
            self.seconds.append(perf_counter() - begun)
            latest = step.latest
            assert latest.watch is not None
            self.watches.append(latest.watch)
            self.hosts.append(self.seconds[-1] - (latest.times[-1] - latest.times[0]))
        return state


def calibrated(
    step: TimedStep,
    beside: TimedStep,
    state: TrainState,
    batch: Any,
    rounds: int,
    comms: Any,
    processors: float | None = None,
) -> Costs:
    """The costs that the ops of a timed step have on these ranks. Collective.

    Args:
        step: the step, whose transfers are waited for as soon as they have begun.
        beside: the same with transfers beside compute.
        state: its state, which is donated.
        batch: this rank's batch.
        rounds: steps that are measured at least. Those around the lower quartile count.
        comms: the communicators of its plan.
        processors: those that a rank has; None for those that the ranks of this job may run on.

    Raises:
        PlanError: no rounds or processors, or a program that does not keep to its schedule.
    """
    wants = [
        ("rounds", rounds, int, "a number of steps"),
        ("processors", processors, (int, float, type(None)), "how many a rank has, such as 0.5"),
    ]
    expect("calibrate(batch)", wants)
    problems = [f"rounds={rounds}: at least 1"] if rounds < 1 else []
    if processors is not None and not 0 < processors < inf:
        problems.append(f"processors={processors}: more than none")
    if problems:
        raise errors.bad_arguments("calibrate", problems)
    apart, overlapped = _in_turns({step: SPAN, beside: SPAN / 2}, state, batch, rounds, comms)
    watched = TimedOps(step.schedule, apart.watches), TimedOps(beside.schedule, overlapped.watches)
    costs = fitted_by_all(comms, watched[0], max(median(apart.hosts), 0.0), processors, watched[1])
    if costs is None:
        raise PlanError("a step that was measured did not keep to its schedule: there is nothing to go by")
    return costs


def _in_turns(
    spans: Mapping[TimedStep, float], state: TrainState, batch: Any, rounds: int, comms: Any
) -> list[StepTimes]:
    """At least so many steps of each kind, and as many as take its span, after some that do not count. Collective.

    They take turns: what else runs on a machine comes and goes in seconds, and would be taken for a difference.
    """
    every: list[tuple[TimedStep, StepTimes, int]] = []
    for step, span in spans.items():
        rows = StepTimes()
        state = StepTimes().take(step, state, batch, WARM)
        state = rows.take(step, state, batch, rounds)
        more = min(steps_in(comms, span, median(rows.seconds)), MOST) - rounds
        every.append((step, rows, ceil(more / TURNS)))
    for _, (step, rows, count) in product(range(TURNS), every):
        if count > 0:
            state = StepTimes().take(step, state, batch, 1)
            state = rows.take(step, state, batch, count)
    return [rows for _, rows, _ in every]
