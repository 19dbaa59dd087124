"""Observers of an executor: what they are told of ops, and when a run is over."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.observers import OpNotes
from fshard.runtime.execution.route import make_route
from fshard.runtime.flight.mapped_file import MappedFile
from fshard.runtime.flight.rank_records import OVER, read_records
from fshard.schedule import Op, Policy, Schedule
from fshard.schedule.ops import COMPUTE_KINDS
from tests.comm.test_flight import Doing
from tests.schedule.test_costs import over

TRAINING = over(3, Policy(prefetch=1))
EVALUATION = dataclasses.replace(TRAINING, ops=TRAINING.ops[:-1])
"""Its last exchange is no op."""


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def begin(self, at: int, op: Op) -> None:
        """An op begins."""
        assert op == TRAINING[at]
        self.events.append(("begin", at))

    def end(self, at: int, op: Op) -> None:
        """It ends."""
        self.events.append(("end", at))

    def end_run(self) -> None:
        """The run ends."""
        self.events.append(("end run", -1))


def executed(schedule: Schedule, observer: Any, **kinds: Any) -> Scheduled:
    """An executor that has made the first op."""
    actions = Doing(**kinds)
    executor = Scheduled(make_route(schedule, actions), actions, None, (observer,))  # type: ignore[arg-type]
    executor.handshake(bool)
    return executor


def test_each_op_begins_and_ends_once_and_none_overlap() -> None:
    told = Told()
    executor = executed(TRAINING, told)
    for op in TRAINING:
        if op.kind in COMPUTE_KINDS:
            executor.reach(op.kind, op.target, op.index)
            executor.settle()
    executor.finish()
    executor.consensus(bool)
    wanted = [(word, at) for at in range(len(TRAINING)) for word in ("begin", "end")]
    assert told.events == [*wanted, ("end run", -1)]


@pytest.mark.parametrize("kind", ["wait_all_gather", "update"])
def test_an_op_that_fails_ends(kind: str) -> None:
    told = Told()
    executor = executed(TRAINING, told, **{kind: lambda: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        executor.finish()
    words = [word for word, _ in told.events]
    assert words == ["begin", "end"] * (len(words) // 2)


@pytest.mark.parametrize("schedule", [TRAINING, EVALUATION], ids=["training", "evaluation"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_mapped_record_ends_a_run_when_its_last_exchange_is_over(
    tmp_path: Path, schedule: Schedule, fails: bool
) -> None:
    mapped = MappedFile(tmp_path, 0, 2)
    mapped.begin(1, schedule)
    executor, last = executed(schedule, OpNotes(mapped)), len(schedule) - 1

    def place() -> int:
        return read_records(tmp_path)[0].entries[-1].op

    def exchange() -> None:
        assert place() == last, "a rank that waits here is not between steps"
        if fails:
            raise ValueError("no answer")

    executor.finish()
    with pytest.raises(ValueError, match="no answer") if fails else contextlib.nullcontext():
        executor.consensus(exchange)
    assert place() == (last if fails else OVER)
