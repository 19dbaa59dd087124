"""Executors that tell of the ops that they run: to the flight recorder, to torch.profiler."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.autograd.profiler import record_function

from fshard.runtime.comm import ProcessTransport
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.comm.flight import Flight
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.execution.route import Actions, Route
from fshard.runtime.execution.signals import Shield
from fshard.schedule.flight import OVER
from fshard.sharding.mesh import Mesh

T = TypeVar("T")

ExecutorMaker = Callable[[Route, Actions, Shield], Scheduled]


class Recorded(Scheduled):
    """Runs the ops of a schedule, and notes each before it runs."""

    def __init__(self, flight: Flight, route: Route, actions: Actions, shield: Shield | None = None) -> None:
        super().__init__(route, actions, shield)
        self.flight, self.number = flight, flight.begin(route.schedule)

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        super().reach(kind, unit, index)
        self.flight.note(self.cursor - 1, self.number)

    def consensus(self, run: Callable[[], T]) -> T:
        """Perform the last op."""
        found = super().consensus(run)
        self.flight.note(OVER, self.number)
        return found

    def _perform(self, run: Callable[[], T]) -> T:
        self.flight.note(self.cursor, self.number)
        return super()._perform(run)

    def _update(self) -> None:
        self.flight.note(self.cursor, self.number)
        super()._update()


class Profiled(Scheduled):
    """Runs the ops of a schedule, each as a range of torch.profiler: ``fshard forward blocks.2``."""

    def __init__(self, route: Route, actions: Actions, shield: Shield | None = None) -> None:
        super().__init__(route, actions, shield)
        self.open: record_function | None = None

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        self._leave()
        super().reach(kind, unit, index)
        self.open = record_function(f"fshard {self.ops[self.cursor - 1]}")
        self.open.__enter__()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Issue the ops that need not wait."""
        self._leave()
        super().settle()

    def finish(self) -> None:
        """Run everything before the consensus."""
        self._leave()
        super().finish()

    def _leave(self) -> None:
        """The compute op is over."""
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def _perform(self, run: Callable[[], T]) -> T:
        with record_function(f"fshard {self.ops[self.cursor]}"):
            return super()._perform(run)

    def _update(self) -> None:
        with record_function(f"fshard {self.ops[self.cursor]}"):
            super()._update()


class RecordedAndProfiled(Recorded, Profiled):
    """Runs the ops of a schedule: each is noted, and a range of torch.profiler."""


def executor_of(mesh: Mesh) -> ExecutorMaker:
    """What runs schedules on this rank.

    Ops are recorded where ``FSHARD_RECORD`` asked for that when the mesh was made. While torch.profiler is on, or
    ``torch.autograd.profiler.emit_nvtx``, each of them is a range.
    """
    transport = mesh.transport
    flight = transport.flight if isinstance(transport, ProcessTransport | SingleRankTransport) else None
    return partial(_made, flight)


def _made(flight: Flight | None, route: Route, actions: Actions, shield: Shield | None = None) -> Scheduled:
    profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if flight is None:
        return (Profiled if profiled else Scheduled)(route, actions, shield)
    return (RecordedAndProfiled if profiled else Recorded)(flight, route, actions, shield)
