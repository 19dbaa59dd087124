"""The protocols of communicators and transports, and their implementations for one rank."""

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fshard.runtime.comm.device_streams import Event
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.flight.recorder import Flight
from fshard.sharding.mesh import Axes
from fshard.threads import Turn

Events = Iterable[Event | None] | None
Sizes = list[int] | None

CLOSED = "the mesh was closed, by mesh.close() or at the end of its `with`: make steps and call them before that"
"""The error of communicators of a closed mesh."""


class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait until the result is safe to read. Raises ``CommError`` if the collective failed or timed out."""


class Communicator(Protocol):
    """One communicator. All tensors are contiguous.

    A collective comes after all that the current stream was given so far; or, with ``after``, after these events alone.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """``out`` = the concatenated shards of all ranks. Its adjoint is ``reduce_scatter``."""

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """``out`` = this rank's chunk of the sum over ranks, plus its own value if ``add``.

        The sum is in the dtype of ``out``; ``full`` may have a shorter one. ``full`` and ``stage`` may be overwritten.
        """

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """``buffer`` = the sum of the buffers of all ranks."""

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """Chunk ``i`` of ``full`` goes to rank ``i``; chunk ``i`` of ``out`` came from it.

        The sizes are the elements of each chunk, of ``out`` and of ``full``; None stands for equal chunks.
        """


class Transport(Protocol):
    """Makes the communicators of a mesh."""

    @property
    def asynchronous(self) -> bool:
        """Tell whether waits for collectives may return while the device still waits for other ranks."""

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of a role, such as a kind of transfer, over these axes. Collective at its first call."""

    def between(self, role: str, axis: str, positions: tuple[int, ...]) -> Communicator:
        """A communicator that some positions on an axis use: of these alone, or of all along the axis.

        Collective on the whole mesh at its first call.
        """

    def part(self, mesh: Any) -> "Transport":
        """The transport of a part of the mesh, whose communicators its ranks make alone."""

    def program(self) -> AbstractContextManager[object]:
        """While a program of all ranks runs: if it fails on another rank, this one's device does not wait for ever.

        Raises:
            CommError: at its end, if that has happened.
        """

    def abort(self, role: str, reason: str = ...) -> None:
        """Close the communicators of a role: peers that wait for this rank there get an error at once."""

    def abort_all(self, reason: str) -> str:
        """Close all communicators for good: this rank cannot continue. Peers that wait for it get the reason.

        Returns:
            A line that says where this rank's record is; empty if there is none.
        """

    def close(self, reason: str = "") -> None:
        """Leave. Collective without a reason; with one, peers that wait for this rank get it."""


@dataclass(frozen=True)
class Done:
    """The handle of a result that is already there."""

    def wait(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class SingleRank:
    """The communicator of one rank: collectives copy."""

    size: int = 1

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """Copy."""
        out.copy_(shard)
        return Done()

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """Copy, or add."""
        sum_rows(out, [full], add)
        return Done()

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """Does nothing: the sum over one rank."""
        return Done()

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """Copy."""
        out.copy_(full)
        return Done()


@dataclass(frozen=True)
class SingleRankTransport:
    """A world of one rank, without a process group."""

    asynchronous: bool = False
    turn: Turn = field(default_factory=Turn, compare=False, repr=False)

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of one rank."""
        return SingleRank()

    def between(self, role: str, axis: str, positions: tuple[int, ...]) -> Communicator:
        """The communicator of one rank."""
        return SingleRank()

    def part(self, mesh: Any) -> "SingleRankTransport":
        """The transport itself."""
        return self

    def program(self) -> AbstractContextManager[object]:
        """Does nothing: there is no other rank."""
        return nullcontext()

    def abort(self, role: str, reason: str = "") -> None:
        """Does nothing: no peer waits."""

    @functools.cached_property
    def flight(self) -> Flight:
        """The record of its ops."""
        return Flight(0, 1)

    def abort_all(self, reason: str) -> str:
        """Does nothing: no peer waits."""
        return ""

    def close(self, reason: str = "") -> None:
        """Does nothing."""


def chunks(flat: Tensor, parts: int, sizes: Sizes) -> Sequence[Tensor]:
    """The chunks of an all-to-all."""
    return torch.split(flat, sizes) if sizes is not None else flat.view(parts, -1).unbind()
