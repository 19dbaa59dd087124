"""Observers of the ops that an executor runs: the flight recorder's ring, and ranges of torch.profiler."""

from torch.autograd.profiler import record_function

from fshard.runtime.comm import ProcessTransport
from fshard.runtime.comm.call_site import executing
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.execution.route import Observer
from fshard.runtime.flight.mapped_file import MappedFile
from fshard.runtime.flight.rank_records import OVER
from fshard.runtime.flight.recorder import Flight
from fshard.schedule.ops import Op
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import profiler_enabled


class OpNotes(Observer):
    """Notes each op in a mapped file before it runs."""

    def __init__(self, mapped: MappedFile) -> None:
        self.mapped = mapped

    def begin(self, at: int, op: Op) -> None:
        """Note the op."""
        self.mapped.note(at)

    def end_run(self) -> None:
        """Note that the rank is between two runs."""
        self.mapped.note(OVER)


class ProfilerRanges(Observer):
    """Makes each op a range of torch.profiler: ``fshard forward blocks.2``."""

    def __init__(self) -> None:
        self.range: record_function | None = None

    def begin(self, at: int, op: Op) -> None:
        """Open the range."""
        self.range = record_function(f"fshard {op}")
        self.range.__enter__()  # type: ignore[no-untyped-call]

    def end(self, at: int, op: Op) -> None:
        """Close the range."""
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None


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


def observers_of(mesh: Mesh) -> tuple[Observer, ...]:
    """The observers of a run on this rank.

    Ops are noted in a mapped file where ``FSHARD_RECORD`` asked for that when the mesh was made. While torch.profiler
    is on, or ``torch.autograd.profiler.emit_nvtx``, each of them is a range.
    """
    flight = flight_of(mesh)
    notes = (OpNotes(flight.mapped),) if flight is not None and flight.mapped is not None else ()
    return (*notes, ProfilerRanges()) if profiler_enabled() else notes
