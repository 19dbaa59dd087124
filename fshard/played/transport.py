"""Communicators between the ranks of one process: the last rank to reach a collective copies its data.

Sums are added in the order of ranks, as on gloo.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.errors import CommError
from fshard.played.cooperative import RankThread, Scheduler, playing
from fshard.runtime.comm import Communicator, Handle
from fshard.runtime.comm.communicator import Events, SingleRank, Sizes, sum_rows
from fshard.sharding.mesh import Axes, Mesh

Part = dict[str, Any]


@dataclass(eq=False)
class Collective:
    """One collective: the tensors of each rank."""

    call: str
    parts: dict[int, Part] = field(default_factory=dict)
    complete: bool = False


@dataclass(eq=False)
class CollectiveLog:
    """The collectives of one communicator, in order."""

    name: str
    members: tuple[int, ...]
    collectives: dict[int, Collective] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VirtualTransport:
    """Joins a rank of a virtual mesh to the others."""

    mesh: Mesh
    scheduler: Scheduler

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of this role over these axes."""
        members = tuple(sorted(self.mesh.ranks(axes)))
        if len(members) == 1:
            return SingleRank()
        log = self.scheduler.logs.setdefault((role, members), CollectiveLog(f"{role}({'+'.join(axes)})", members))
        return VirtualCommunicator(log, self.mesh.rank, self.scheduler)

    def abort(self, role: str, reason: str = "") -> None:
        """Does nothing: the scheduler detects a deadlock."""

    def abort_all(self, reason: str) -> None:
        """Let every rank fail at its next collective."""
        if self.scheduler.failure is None:
            self.scheduler.fail(f"rank {self.mesh.rank} gave up: {reason}")

    def close(self, reason: str = "") -> None:
        """Does nothing: the scheduler sees the rank's exception."""


@dataclass(frozen=True)
class Arrival:
    """A collective that other ranks may not have reached."""

    collective: Collective
    log: CollectiveLog
    number: int
    thread: RankThread

    def wait(self) -> None:
        """Let the others run until all have reached it."""
        if not self.collective.complete:
            what = f"{self.collective.call} on {self.log.name}, its call {self.number}"
            self.thread.scheduler.wait(self.thread, lambda: self.collective.complete, what)


@dataclass(frozen=True)
class VirtualCommunicator:
    """A communicator between threads."""

    log: CollectiveLog
    rank: int
    scheduler: Scheduler

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.log.members)

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """Copy every shard to every rank."""
        return self._arrive(f"all-gather of {_size(shard)}", {"out": out, "full": shard}, _all_gather)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """Add the chunks of all ranks in their order."""
        return self._arrive(f"reduce-scatter of {_size(full)}", {"out": out, "full": full, "add": add}, _reduce_scatter)

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """Add the buffers of all ranks in their order."""
        return self._arrive(f"all-reduce of {_size(buffer)}", {"out": buffer}, _all_reduce)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """Copy each chunk to its rank."""
        equal = [full.numel() // self.size] * self.size
        part = {"out": out, "full": full, "receive": receive or equal, "send": send or equal}
        return self._arrive("all-to-all" if send else f"all-to-all of {_size(full)}", part, _all_to_all)

    def _arrive(self, call: str, part: Part, perform: Callable[[list[Part]], None]) -> Handle:
        thread = playing()
        if thread is None or thread.scheduler is not self.scheduler or thread.rank != self.rank:
            raise CommError(
                f"{call} on {self.log.name} of rank {self.rank} outside of its run: make forward and backward in the "
                f"same mesh.run, which each rank leaves with results only"
            )
        if self.scheduler.failure is not None:
            raise CommError(self.scheduler.failure)
        number = self.log.counts[self.rank] = self.log.counts.get(self.rank, 0) + 1
        collective = self.log.collectives.setdefault(number, Collective(call))
        handle = Arrival(collective, self.log, number, thread)
        if collective.call != call:
            self._disagree(handle, call)
        collective.parts[self.rank] = part
        if len(collective.parts) == self.size:
            del self.log.collectives[number]
            inference = any(part["out"].is_inference() for part in collective.parts.values())
            with torch.inference_mode(inference), torch.no_grad():
                perform([collective.parts[rank] for rank in self.log.members])
            collective.complete = True
            collective.parts.clear()
        return handle

    def _disagree(self, handle: Arrival, call: str) -> None:
        first = min(handle.collective.parts)
        thread = handle.thread
        thread.waits = (lambda: False, f"{call} on {self.log.name}, its call {handle.number}")
        where = f"on {self.log.name} where rank {first} calls {handle.collective.call}"
        self.scheduler.fail(f"rank {self.rank} calls {call} {where}:")
        raise CommError(str(self.scheduler.failure))


def _size(x: Tensor) -> str:
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"


def _all_gather(parts: list[Part]) -> None:
    full = torch.cat([part["full"].reshape(-1) for part in parts])
    for part in parts:
        part["out"].view(-1).copy_(full)


def _reduce_scatter(parts: list[Part]) -> None:
    rows = [part["full"].reshape(len(parts), -1).clone() for part in parts]
    for number, part in enumerate(parts):
        sum_rows(part["out"].view(-1), [row[number] for row in rows], part["add"])


def _all_reduce(parts: list[Part]) -> None:
    total = parts[0]["out"].clone()
    for part in parts[1:]:
        total += part["out"]
    for part in parts:
        part["out"].copy_(total)


def _all_to_all(parts: list[Part]) -> None:
    chunks = [part["full"].reshape(-1).split(part["send"]) for part in parts]
    for number, part in enumerate(parts):
        arriving = [row[number] for row in chunks]
        sizes = [chunk.numel() for chunk in arriving]
        if sizes != part["receive"]:
            raise CommError(f"all-to-all: a rank expects chunks of {part['receive']} elements and is sent {sizes}")
        part["out"].view(-1).copy_(torch.cat(arriving))
