"""Executors that tell of the ops that they run: to the flight recorder, to torch.profiler."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch.autograd.profiler import record_function

from fshard.runtime.comm import ProcessTransport
from fshard.runtime.comm.call_site import executing
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.comm.flight import Flight, MappedFile
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.execution.route import Route, ScheduleActions
from fshard.runtime.execution.signals import Shield
from fshard.schedule.flight import OVER
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import profiler_enabled

T = TypeVar("T")

ExecutorMaker = Callable[[Route, ScheduleActions, Shield], Scheduled]


class RecordingExecutor(Scheduled):
    """Runs the ops of a schedule, and notes each in a mapped file before it runs."""

    def __init__(
        self, mapped: MappedFile, route: Route, actions: ScheduleActions, shield: Shield | None = None
    ) -> None:
        super().__init__(route, actions, shield)
        self.mapped = mapped

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        super().reach(kind, unit, index)
        self.mapped.note(self.cursor - 1)

    def consensus(self, run: Callable[[], T]) -> T:
        """Perform the last op."""
        found = super().consensus(run)
        self.mapped.note(OVER)
        return found

    def _perform(self, run: Callable[[], T]) -> T:
        self.mapped.note(self.cursor)
        return super()._perform(run)

    def _update(self) -> None:
        self.mapped.note(self.cursor)
        super()._update()


class Profiled(Scheduled):
    """Runs the ops of a schedule, each as a range of torch.profiler: ``fshard forward blocks.2``."""

    def __init__(self, route: Route, actions: ScheduleActions, shield: Shield | None = None) -> None:
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


class RecordedAndProfiled(RecordingExecutor, Profiled):
    """Runs the ops of a schedule: each is noted, and a range of torch.profiler."""


def flight_of(mesh: Mesh) -> Flight | None:
    """The flight recorder of this rank; None on a mesh without processes."""
    transport = mesh.transport
    return transport.flight if isinstance(transport, ProcessTransport | SingleRankTransport) else None


def begin(mesh: Mesh, executor: Scheduled | OnDemand) -> None:
    """A run begins: from now on it is recorded, and errors of other threads say at which op it is."""
    executing(executor)
    flight = flight_of(mesh)
    if flight is not None and isinstance(executor, Scheduled):
        flight.begin(executor.route.schedule, executor.record, executor.times)


def executor_of(mesh: Mesh) -> ExecutorMaker:
    """Return what runs schedules on this rank.

    Ops are noted in a mapped file where ``FSHARD_RECORD`` asked for that when the mesh was made. While torch.profiler
    is on, or ``torch.autograd.profiler.emit_nvtx``, each of them is a range.
    """
    flight = flight_of(mesh)
    return partial(_made, flight.mapped if flight is not None else None)


def _made(mapped: MappedFile | None, route: Route, actions: ScheduleActions, shield: Shield | None = None) -> Scheduled:
    profiled = profiler_enabled()
    if mapped is None:
        return (Profiled if profiled else Scheduled)(route, actions, shield)
    return (RecordedAndProfiled if profiled else RecordingExecutor)(mapped, route, actions, shield)
