"""Communicators between the ranks of one process: the last rank to reach a collective copies its data.

Sums are added in the order of ranks, as on gloo.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.errors import CommError
from fshard.played.cooperative import RankThread, playing
from fshard.runtime.comm import Communicator, Handle
from fshard.runtime.comm.communicator import Events, SingleRank, Sizes
from fshard.runtime.comm.row_sums import sum_rows
from fshard.sharding.mesh import Axes, Mesh
from fshard.torch_internals import DisableTorchFunction, disable_current_modes

Part = dict[str, Any]


@dataclass(eq=False)
class PlayedCollective:
    """One collective: the tensors of each rank."""

    call: str
    parts: dict[int, Part] = field(default_factory=dict)
    complete: bool = False


@dataclass(eq=False)
class CollectiveLog:
    """The collectives of one communicator in one of its lives, in order."""

    name: str
    members: tuple[int, ...]
    role: str
    life: int
    collectives: dict[int, PlayedCollective] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VirtualTransport:
    """Joins a rank of a virtual mesh to the others, in every run of it.

    Attributes:
        mesh: the mesh as the rank sees it.
        host: the virtual mesh, whose runs it serves.
    """

    mesh: Mesh
    host: Mesh
    asynchronous: bool = False

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of this role over these axes."""
        members = tuple(sorted(self.mesh.ranks(axes)))
        if len(members) == 1:
            return SingleRank()
        if (thread := self._playing()) is not None:
            thread.scheduler.lives.join(role, self.mesh.rank)
        return VirtualCommunicator(role, f"{role}({'+'.join(axes)})", members, self.mesh.rank, self.host)

    def between(self, role: str, axis: str, positions: tuple[int, ...]) -> Communicator:
        """The communicator of some positions on an axis; of one rank for all others."""
        along = self.mesh.ranks(axis)
        members = tuple(sorted(along[position] for position in positions))
        if self.mesh.rank not in members:
            return SingleRank()
        if (thread := self._playing()) is not None:
            thread.scheduler.lives.join(role, self.mesh.rank)
        return VirtualCommunicator(role, f"{role}({axis})", members, self.mesh.rank, self.host)

    def part(self, mesh: Any) -> "VirtualTransport":
        """The transport of a part of the mesh."""
        return PartOfVirtual(self.mesh, self.host, over=mesh.over)

    def program(self) -> AbstractContextManager[object]:
        """Does nothing: a rank that waits for another is in a collective, and gets an error there."""
        return nullcontext()

    def abort(self, role: str, reason: str = "the step failed") -> None:
        """Let ranks fail that wait for this one in a collective of the role, or come to one."""
        if (thread := self._playing()) is not None:
            thread.scheduler.lives.end(role, self.mesh.rank, reason)

    def abort_all(self, reason: str) -> str:
        """Let every rank fail at its next collective of this run."""
        thread = self._playing()
        if thread is not None and thread.scheduler.failure is None:
            thread.scheduler.fail(f"rank {self.mesh.rank} gave up: {reason}")
        return ""

    def _playing(self) -> RankThread | None:
        """The thread of a rank in a run of this mesh."""
        thread = playing()
        return thread if thread is not None and thread.scheduler.mesh is self.host else None

    def close(self, reason: str = "") -> None:
        """Does nothing: the scheduler sees the rank's exception."""


@dataclass(frozen=True)
class PartOfVirtual(VirtualTransport):
    """Joins the ranks of one replica that trains apart. ``mesh`` is that of all replicas, ``over`` their axis."""

    over: str = "replica"

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of this role over these axes, within the replica."""
        return super().communicator(role, tuple(axis for axis in axes if axis != self.over))


@dataclass(frozen=True)
class Arrival:
    """A collective that other ranks may not have reached."""

    collective: PlayedCollective
    log: CollectiveLog
    number: int
    thread: RankThread

    def wait(self) -> None:
        """Let the others run until all have reached it. Raises ``CommError`` if one of them never will."""
        if not self.collective.complete:
            if self.thread is not playing():
                raise CommError(
                    f"{self.collective.call} on {self.log.name} was started in a run that ended before all ranks had "
                    f"made it: wait for it in the same mesh.run"
                )
            what = f"{self.collective.call} on {self.log.name}, its call {self.number}"
            self.thread.scheduler.wait(self.thread, lambda: self.collective.complete or bool(self._gone()), what)
            if not self.collective.complete:
                raise CommError(f"{self.collective.call} on {self.log.name} failed: {self._gone()}")

    def _gone(self) -> str:
        """Say which ranks will not come, and why."""
        return self.thread.scheduler.lives.gone(self.log.role, self.log.life, self.log.members)


@dataclass(frozen=True)
class VirtualCommunicator:
    """A communicator between threads. It outlives a run: each run of the mesh counts its collectives anew."""

    role: str
    name: str
    members: tuple[int, ...]
    rank: int
    host: Mesh

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """Copy every shard to every rank."""
        return self._arrive(f"all-gather of {_size(shard)}", {"out": out, "full": shard}, _all_gather)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """Add the chunks of all ranks in their order."""
        return self._arrive(f"reduce-scatter of {_size(full)}", {"out": out, "full": full, "add": add}, _reduce_scatter)

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """Add the buffers of all ranks in their order."""
        return self._arrive(f"all-reduce of {_size(buffer)}", {"out": buffer}, _all_reduce)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """Copy each chunk to its rank."""
        equal = [full.numel() // self.size] * self.size
        part = {"out": out, "full": full, "receive": receive or equal, "send": send or equal}
        return self._arrive("all-to-all" if send else f"all-to-all of {_size(full)}", part, _all_to_all)

    def _arrive(self, call: str, part: Part, perform: Callable[[list[Part]], None]) -> Handle:
        thread = self._thread(call)
        scheduler = thread.scheduler
        if scheduler.failure is not None:
            raise CommError(scheduler.failure)
        thread.check_interrupt()
        life = scheduler.lives.join(self.role, self.rank)
        if gone := scheduler.lives.gone(self.role, life, self.members):
            raise CommError(f"{call} on {self.name} failed: {gone}")
        made = CollectiveLog(self.name, self.members, self.role, life)
        log = scheduler.logs.setdefault((self.role, self.members, life), made)
        number = log.counts[self.rank] = log.counts.get(self.rank, 0) + 1
        collective = log.collectives.setdefault(number, PlayedCollective(call))
        handle = Arrival(collective, log, number, thread)
        if collective.call != call:
            self._disagree(handle, call)
        collective.parts[self.rank] = part
        if len(collective.parts) == self.size:
            del log.collectives[number]
            _performed(perform, [collective.parts[rank] for rank in self.members])
            collective.complete = True
            collective.parts.clear()
        return handle

    def _thread(self, call: str) -> RankThread:
        """The thread of this rank in the run that goes on."""
        thread = playing()
        if thread is None or thread.scheduler.mesh is not self.host:
            raise CommError(
                f"{call} on {self.name} of rank {self.rank} outside of its run: what mesh.run has returned for a rank "
                f"communicates inside of mesh.run only, on that rank, as results[mesh.rank]; what is made outside of "
                f"mesh.run works on both sides"
            )
        if thread.rank != self.rank:
            raise CommError(
                f"{call} on {self.name}: rank {thread.rank} uses what belongs to rank {self.rank}: mesh.run has "
                f"returned one result for each rank, so use results[mesh.rank]"
            )
        return thread

    def _disagree(self, handle: Arrival, call: str) -> None:
        first = min(handle.collective.parts)
        thread, scheduler = handle.thread, handle.thread.scheduler
        thread.waits = (lambda: False, f"{call} on {self.name}, its call {handle.number}")
        where = f"on {self.name} where rank {first} calls {handle.collective.call}"
        scheduler.fail(f"rank {self.rank} calls {call} {where}:")
        raise CommError(str(scheduler.failure))


def _performed(perform: Callable[[list[Part]], None], parts: list[Part]) -> None:
    """Move the data of all ranks, unseen by modes of the rank that comes last, such as those of checkpointing."""
    inference = any(part["out"].is_inference() for part in parts)
    with disable_current_modes(), DisableTorchFunction(), torch.inference_mode(inference), torch.no_grad():
        perform(parts)


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
