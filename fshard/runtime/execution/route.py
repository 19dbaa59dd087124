"""Routes: schedules with all that can be looked up before they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fshard.schedule.activation_moves import FETCH, OFFLOAD
from fshard.schedule.ops import COMPUTE_KINDS, GROUP_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.schedule_memory import update_runs
from fshard.schedule.transfers import started

Run = Callable[[], None]

SETTLED = GROUP_KINDS | {OFFLOAD.wait}
"""Ops that need not wait for the next compute, beside those that start transfers: a device waits for copies, and its
host does not. What comes back waits for the next compute: the memory that it takes is needed for the loss before."""


class ScheduleActions(Protocol):
    """Performs the ops of a schedule."""

    readable: set[int]
    """The groups that units can read now."""

    def bind(self, ops: Sequence[Op]) -> list[Run | None]:
        """Return what to call for each op; None for computes, updates, the handshake and the consensus."""

    def apply(self, groups: Sequence[int]) -> None:
        """Update these groups."""

    def where(self, name: str) -> str:
        """The unit and the leaves of a group, as an error names them."""


class Observer:
    """Is told of the ops that an executor runs, by their numbers in the schedule.

    Ops do not overlap. Updates that are made together begin one after the other, and the last of them has their time.
    """

    def begin(self, at: int, op: Op) -> None:
        """An op is about to run."""

    def end(self, at: int, op: Op) -> None:
        """The op is over, or has failed. A compute op is over where another op begins, or nothing is left to issue."""

    def end_run(self) -> None:
        """The run is over on all ranks: after its last exchange, which is no op of an evaluation."""


@dataclass(frozen=True)
class Route:
    """A schedule as it runs, with all that can be looked up before: made once a schedule.

    Attributes:
        runs: what to call for each op; None for those that the executor performs itself.
        positions: where each compute op stands, by kind, unit, call and microbatch.
        settled: for each op, the first one from it on that may wait.
        updates: for the first of some updates that follow each other, the op after them, and their groups' ids.
        observers: what is told of each op.
    """

    schedule: Schedule
    runs: list[Run | None]
    positions: Mapping[tuple[str, str, int, int], int]
    settled: Sequence[int]
    updates: Mapping[int, tuple[int, Sequence[int]]]
    observers: tuple[Observer, ...] = ()


def make_route(schedule: Schedule, actions: ScheduleActions) -> Route:
    """The route of a schedule."""
    ops = schedule.ops
    settled = [*range(len(ops) + 1)]
    for at in range(len(ops) - 1, -1, -1):
        if ops[at].kind in SETTLED or (ops[at].kind != FETCH.name and started(ops[at].kind)):
            settled[at] = settled[at + 1]
    positions = {
        (op.kind, op.target, op.index, op.microbatch): at for at, op in enumerate(ops) if op.kind in COMPUTE_KINDS
    }
    return Route(schedule, actions.bind(ops), positions, settled, _updates(schedule))


def _updates(schedule: Schedule) -> dict[int, tuple[int, list[int]]]:
    """Runs of updates: by the first one, the op after the last one, and the ids of their groups."""
    ids = {group.name: number for number, group in enumerate(schedule.groups)}
    runs = update_runs(schedule.ops, schedule.groups)
    return {run.start: (run.stop, [ids[op.target] for op in schedule.ops[run.start : run.stop]]) for run in runs}
