"""What a communicator is, and the communicator of one rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from fshard.runtime.comm.streams import Event
from fshard.sharding.mesh import Axes

COLLECTIVES = "collectives"
"""The role of the communicators of what users call: it never queues behind what a step has under way."""

Events = Iterable[Event | None]
Sizes = list[int] | None


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Make its result safe to read. Raises ``CommError`` if it failed or timed out."""


class Communicator(Protocol):
    """One communicator. All tensors are contiguous; ``after`` holds the events that must be passed first."""

    @property
    def size(self) -> int:
        """The number of ranks that it joins."""

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """``out`` = the shards of all ranks, one after the other. Its adjoint is ``reduce_scatter``."""

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """``out`` = this rank's chunk of the sum over ranks, added to what it holds if ``add``.

        ``full`` may be of a lower precision than ``out``; the sum is taken in that of ``out``.
        ``full`` and ``stage`` may be overwritten.
        """

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """``buffer`` = its sum over ranks."""

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """Chunk ``i`` of ``full`` goes to rank ``i``; chunk ``i`` of ``out`` came from it.

        The sizes are the elements of each chunk, of ``out`` and of ``full``; None stands for equal chunks.
        """


class Transport(Protocol):
    """What joins the ranks of a mesh."""

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of a role (``gather``, ``reduce``, ...) over these axes; made once, collectively."""

    def abort(self, role: str, reason: str = ...) -> None:
        """Let peers that wait for this rank in a communicator of this role know that it will not come."""

    def abort_all(self, reason: str) -> None:
        """Let all peers know that this rank is out of step for good."""

    def close(self, reason: str = "") -> None:
        """Leave. Collective, unless there is a reason, which peers that wait for this rank are told."""


@dataclass(frozen=True)
class Done:
    """The handle of something that is already there."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class SingleRank:
    """The communicator of one rank: collectives are copies."""

    size: int = 1

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """Copy."""
        out.copy_(shard)
        return Done()

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """Copy, or add."""
        sum_rows(out, [full], add)
        return Done()

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """Nothing: the sum over one rank."""
        return Done()

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """Copy."""
        out.copy_(full)
        return Done()


@dataclass(frozen=True)
class SingleRankTransport:
    """A world of one rank, without a process group."""

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """Every communicator of one rank is alike."""
        return SingleRank()

    def abort(self, role: str, reason: str = "") -> None:
        """Nobody waits."""

    def abort_all(self, reason: str) -> None:
        """Nobody waits."""

    def close(self, reason: str = "") -> None:
        """Nothing was joined."""


def sum_rows(out: Tensor, rows: Iterable[Tensor], add: bool) -> None:
    """``out`` = (its value if ``add``, plus) the rows added in order, in the dtype of ``out``.

    ``out`` may be the first row, or the second.
    """
    coming = iter(rows)
    if not add:
        first, second = next(coming), next(coming, None)
        if second is not None and first.dtype == out.dtype:
            torch.add(first, second, out=out)
        else:
            out.copy_(first)
            coming = chain([second] if second is not None else [], coming)
    for row in coming:
        out.add_(row)


def chunks(flat: Tensor, parts: int, sizes: Sizes) -> Sequence[Tensor]:
    """The chunks of an all-to-all, one behind the other."""
    return torch.split(flat, sizes) if sizes is not None else flat.view(parts, -1).unbind()
