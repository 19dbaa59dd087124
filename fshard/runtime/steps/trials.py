"""Trials of ``schedule="auto"``: the first steps are timed, and what they cost decides."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.execution.timed import Stopwatch
from fshard.runtime.steps.calibrate import TimedOps, fitted_by_all
from fshard.runtime.steps.contests import Contest, opened
from fshard.schedule.auto import Auto, Choice, choose
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.check import check
from fshard.schedule.contest import scheduled
from fshard.schedule.fit import APART
from fshard.schedule.footprint import footprint
from fshard.schedule.policy import secondary
from fshard.schedule.schedule import Schedule

WARM, TIMED = 2, 4
"""Steps before those that count, and those that do."""


@dataclass(frozen=True)
class Trial:
    """The timed steps of a program so far.

    Attributes:
        schedule: their schedule, in which every transfer is waited for as soon as it has begun.
        task: what a policy is chosen for, with the needs that all ranks agreed on.
        watches: what the ops of each step took on this rank.
    """

    schedule: Schedule
    task: PolicyTask
    watches: list[Stopwatch] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Tell whether all of them are made."""
        return len(self.watches) >= WARM + TIMED

    @property
    def arena_bytes(self) -> int:
        """The arena of its steps."""
        return self.schedule.memory.arena_bytes

    def note(self, times: Sequence[float], watch: Stopwatch | None) -> None:
        """A step is made, on all ranks.

        Args:
            times: not used.
            watch: what its ops took.
        """
        assert watch is not None
        self.watches.append(watch)

    @property
    def dispensable(self) -> bool:
        """Tell whether the next step could run under another policy: its policy holds less than most."""
        return False

    def fail(self) -> None:
        """A step has failed, on all ranks: it does not count."""

    def conclude(self, comms: Communicators, auto: Auto, choice: Choice) -> tuple[Choice, Contest | None]:
        """The choice by what the steps cost, or the given one if a rank's left their schedule; and its contest.

        Collective.
        """
        costs = fitted_by_all(comms, TimedOps(self.schedule, self.watches[WARM:]))
        made = choice if costs is None else choose(self.task, auto, costs)
        return made, opened(comms, made)


def begun(comms: Communicators, choice: Choice, auto: Auto) -> Trial | Contest | None:
    """Return what follows the first choice of a program.

    Its trial, or at once its contest if timed steps exceed the memory.

    None where rates were given, or nothing is to be found out. Collective.

    Args:
        comms: the communicators of the plan.
        choice: by rates, with the needs that all ranks agreed on.
        auto: what was asked for.
    """
    task = choice.task
    if comms.plan.mesh.size == 1 or auto.compute is not None or auto.wire is not None or not task.needs:
        return None
    kept = [secondary(*axes) for axes in task.second]
    policy = replace(APART, update=auto.update, reshard=kept[0] if kept else True)  # it times gathers of both kinds
    schedule = scheduled(task, policy)
    check(schedule)
    if auto.memory is not None and footprint(schedule, task.needs, task.graphs).peak_bytes > auto.memory:
        return opened(comms, choice)
    return Trial(schedule, task)
