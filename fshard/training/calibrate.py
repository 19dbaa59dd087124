"""Calibration: a few timed steps, and the costs that they had."""

from statistics import median
from time import perf_counter
from typing import Any, Protocol

from fshard import errors
from fshard.arguments import expect
from fshard.runtime.steps import Latest
from fshard.runtime.steps.calibrate import fitted, op_times
from fshard.schedule.costs import Costs
from fshard.schedule.schedule import Schedule
from fshard.state.train_state import TrainState

WARM = 2
"""Steps before those that are measured: the first allocates, compares unit graphs, and opens connections."""


class Measured(Protocol):
    """A step whose ops are timed."""

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Make a step."""

    @property
    def latest(self) -> Latest:
        """What the latest run did, and when."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest run."""


def calibrated(step: Measured, state: TrainState, batch: Any, rounds: int, comms: Any) -> Costs:
    """The costs that the ops of a timed step have on these ranks. Collective.

    Args:
        step: the step, whose transfers are waited for as soon as they have begun.
        state: its state, which is donated.
        batch: this rank's batch.
        rounds: steps that are measured. Those that nothing disturbed count.
        comms: the communicators of its plan.

    Raises:
        PlanError: no rounds, or a program that does not keep to its schedule.
    """
    expect("calibrate(batch)", [("rounds", rounds, int, "a number of steps")])
    if rounds < 1:
        raise errors.bad_arguments("calibrate", [f"rounds={rounds}: at least 1"])
    rows, hosts = [], []
    for number in range(WARM + rounds):
        begun = perf_counter()
        state, _ = step(state, batch)
        seconds = perf_counter() - begun
        if number >= WARM:
            latest = step.latest
            assert latest.watch is not None
            rows.append(op_times(latest.watch, len(step.schedule)))
            hosts.append(seconds - (latest.times[-1] - latest.times[0]))
    return fitted(comms, step.schedule, rows, max(median(hosts), 0.0))
