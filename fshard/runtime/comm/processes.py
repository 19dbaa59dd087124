"""The transport between processes of a torch.distributed job."""

import datetime
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard.errors import CommError, PeerError, ScheduleError
from fshard.forks import keep, own
from fshard.runtime.comm.bounded import bounded, bounded_together
from fshard.runtime.comm.calls import announce
from fshard.runtime.comm.communicator import CLOSED, Communicator, SingleRank
from fshard.runtime.comm.device_release import Cuts
from fshard.runtime.comm.device_streams import make_stream
from fshard.runtime.comm.ending import Descriptors
from fshard.runtime.comm.exchange import exchange, exchange_text
from fshard.runtime.comm.gloo import GlooCommunicator, without_interrupting
from fshard.runtime.comm.host import HostCommunicator
from fshard.runtime.comm.links import PeerLink, Rendezvous, close_links, host_key
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.row_sums import kernel_of
from fshard.runtime.comm.watchdog import Watchdog
from fshard.runtime.flight.recorder import Flight
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Axes, Mesh
from fshard.threads import Turn
from fshard.torch_internals import default_group

T = TypeVar("T")
GRACE = 1.5
"""Seconds beyond the timeout for inner timeouts to be reported."""

DROPPING, PARTING = 1.0, 5.0
"""Seconds for closing connections: after a failure, and at the end."""

STORE = (
    "the store of the job, on the host of rank 0 or of torchrun's first agent, cannot be reached, or ranks did not come"
)
"""The cause of errors of the store."""


class ProcessTransport:
    """Joins the ranks of a torch.distributed job. All ranks make communicators in the same order, at their first call.

    Args:
        mesh: this rank's view of the mesh.
        backend: ``"gloo"``, ``"nccl"`` or ``"fake"``. Control messages never go over NCCL.
        timeout: how long a rank waits for others.
        owned: whether ``close`` destroys the default process group.
        shared_memory: whether ranks of one host use shared memory in place of gloo.
        flight: the record of this rank; a new one by default.
        descriptors: sockets that are this process's alone; none so far by default.
    """

    def __init__(
        self,
        mesh: Mesh,
        backend: str,
        timeout: datetime.timedelta,
        owned: bool,
        shared_memory: bool = True,
        flight: Flight | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        self.mesh, self.backend, self.timeout, self.owned = mesh, backend, timeout, owned
        self.shared_memory = shared_memory
        self.parts: list[ProcessTransport] = []  # of replicas, closed with this one
        self.comms: dict[tuple[str, Axes], Communicator] = {}
        self.base: Communicator | None = None
        self.hosts, self.groups = list[str](), list[Any]()
        self.lost = ""
        self.flight = flight or Flight(mesh.rank, mesh.size)
        self.descriptors = descriptors or Descriptors()
        self.watchdog = Watchdog(mesh.members[mesh.rank], timeout.total_seconds(), self.abort_all, flight=self.flight)
        self.cuts = Cuts(self.watchdog, mesh.members[mesh.rank], self._waiting, self._heard)
        own(self)
        if backend == "gloo":  # nobody can wait for a mesh that nobody holds: its groups end without the others
            weakref.finalize(self, _drop_groups, self.groups).atexit = False

    def disown(self, why: str) -> None:
        """Make no communicators, and leave without a word. What exists is kept: threads that end it are gone."""
        self.lost = why
        keep([*self.groups, *([default_group()] if dist.is_initialized() else [])])
        self.groups.clear()

    @property
    def turn(self) -> Turn:
        """The turn of the thread that makes a call, on this mesh or a part of it."""
        return self.flight.turn

    @property
    def asynchronous(self) -> bool:
        """Tell whether the device may wait for other ranks while the host does not."""
        return self.backend == "nccl"

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of this role over these axes."""
        if self.mesh.axis_size(axes) == 1:
            return SingleRank()
        if self.lost:
            raise CommError(f"no rank of this mesh can be reached any more: {self.lost}")
        if (role, axes) not in self.comms:
            self.comms[role, axes] = self._made(role, axes)
        return self.comms[role, axes]

    def between(self, role: str, axis: str, positions: tuple[int, ...]) -> Communicator:
        """A communicator of all ranks along an axis, which some positions use: no other one waits for them."""
        return self.communicator(role, (axis,))

    def program(self) -> AbstractContextManager[object]:
        """While a program of all ranks runs: over NCCL, look for notes of ranks on which it has failed.

        Raises:
            CommError: at its end, if such a note has ended what this rank's device waited for.
        """
        return self.cuts.program() if self.asynchronous else nullcontext()

    def abort(self, role: str, reason: str = "the step failed") -> None:
        """Close the communicators of a role, so that peers that wait for this rank there get an error.

        Every rank does so sooner or later; the next call of ``communicator`` makes new ones. With NCCL peers get no
        error by that: each rank ends its own wait when it learns of the failure by the exchange of statuses, or, where
        its program does not come so far, by a note.
        """
        gone = [] if self.descriptors.forked else [key for key in self.comms if key[0] == role]
        self._drop([self.comms.pop(key) for key in gone], reason)

    def _waiting(self) -> dict[str, list[NcclCommunicator]]:
        """The communicators for which the device may wait while the host does not, by role."""
        found: dict[str, list[NcclCommunicator]] = {}
        for (role, _), comm in self.comms.copy().items():  # in the watchdog's thread
            if isinstance(comm, NcclCommunicator):
                found.setdefault(role, []).append(comm)
        return found

    def _heard(self, role: str, comms: Sequence[NcclCommunicator], reason: str) -> None:
        """Another rank has failed in its program, or cannot continue at all."""
        self.cuts.drop_graphs()
        if role == COLLECTIVES:
            self._cut(comms, reason)  # they stay: nobody would help to make new ones
        else:
            self.abort_all(reason)

    def abort_all(self, reason: str) -> str:
        """Close all communicators for good, so that no peer waits for this rank, and leave this rank's record."""
        if self.descriptors.forked:
            return ""
        self.lost = self.lost or reason
        self._drop([*self.comms.values(), self.base], reason)
        for part in self.parts:
            ProcessTransport.abort_all(part, reason)
        return self.flight.leave(reason)

    def close(self, reason: str = "") -> None:
        """Close all communicators and destroy their groups, and the default group if ``make_mesh`` made it."""
        if self.descriptors.forked:
            return
        for part in self.parts:
            part.close(reason)
        self.watchdog.close()
        self.lost = self.lost or reason or CLOSED
        if not reason:
            self.flight.withdraw()
        self._drop([*self.comms.values()], reason)
        self.comms.clear()
        self.base = None
        self._destroy([*self.groups], PARTING)
        self.groups.clear()
        if self.owned and dist.is_initialized():
            with suppress(TimeoutError):
                bounded(dist.destroy_process_group, PARTING, "leaving the process group")

    def _drop(self, comms: Sequence[Communicator | None], reason: str) -> None:
        """Close communicators: first those that send peers a message, then those that leave a note in the store."""
        self.cuts.drop_graphs()
        for comm in comms:
            if isinstance(comm, HostCommunicator):
                comm.close(reason)
        gone = []
        for comm in comms:
            if isinstance(comm, GlooCommunicator) and comm.group is not None:
                gone.append(comm.close(reason))
        if reason:
            late = [comm for comm in comms if isinstance(comm, NcclCommunicator)]
            self.cuts.tell(late, reason)
            gone += self._cut(late, reason)
        gone = [group for group in gone if group is not None]  # another thread may have closed it at the same time
        self.groups[:] = [group for group in self.groups if not any(group is other for other in gone)]
        self._destroy(gone, DROPPING)

    def _cut(self, comms: Sequence[NcclCommunicator], reason: str) -> list[Any]:
        """Abort NCCL's collectives in flight: kernels that wait for other ranks end then.

        All at once: an abort frees memory, which waits for the kernels of other communicators (pytorch/pytorch#119797).
        """
        groups = [group for comm in comms if (group := comm.close(reason)) is not None]
        if groups:
            with suppress(TimeoutError, RuntimeError):
                bounded_together([group.abort for group in groups], DROPPING, "aborting collectives")
        return groups

    def _destroy(self, groups: list[Any], seconds: float) -> None:
        """Destroy process groups. Their connections close with the last reference."""

        def destroy() -> None:
            while groups:
                with suppress(ValueError):  # another thread has closed it at the same time
                    dist.destroy_process_group(groups.pop())

        if groups and dist.is_initialized():
            with suppress(TimeoutError):
                bounded(destroy, seconds, "closing connections")

    def meet(self, look: Callable[[], object]) -> None:
        """Connect all ranks, so that from now on each sees at once when another one ends. Collective.

        Args:
            look: raises if a rank has ended before it was connected.
        """
        if self.mesh.size > 1 and self.backend != "fake":
            self._in_time(self._base, "the first communicator", look)

    def _made(self, role: str, axes: Axes) -> Communicator:
        """A new communicator."""
        return self._in_time(lambda: self._make(role, axes), f"the communicator {role}({'+'.join(axes)})")

    def _in_time(
        self, make: Callable[[], Communicator], what: str, look: Callable[[], object] | None = None
    ) -> Communicator:
        """Make it within the timeout, since the host of the store may be gone."""
        self.watchdog.start()
        try:
            with naming_errors(f"making {what}"), self.watchdog.waiting(what):
                return bounded(make, self.watchdog.timeout + GRACE, f"making {what}", look)
        except (ScheduleError, PeerError):
            self.abort(COLLECTIVES)  # as ranks at a step do
            raise
        except CommError as error:
            if isinstance(error.__cause__, dist.DistNetworkError | dist.DistStoreError):
                raise CommError(f"{error} ({STORE})") from error
            with self.watchdog.explaining(self.mesh.members, fatal=True):
                raise

    def _make(self, role: str, axes: Axes) -> Communicator:
        backend = "gloo" if role.startswith(("control", "checkpoint")) and self.backend != "fake" else self.backend
        name, size, parts = f"{role}({'+'.join(axes)})", self.mesh.axis_size(axes), self.mesh.partition(axes)
        # A step whose program fails still reaches its consensus; the next call reports a save that fails in its thread.
        fatal = role != COLLECTIVES and not role.startswith("checkpoint")
        if self.backend != "fake":
            # Without names of axes: ranks of two meshes can then exchange messages and report how the meshes differ.
            announce(self._meeting(role), f"making the communicator {role} of {parts}")
        links, linked = self._connect(parts) if backend == "gloo" and self.shared_memory else (None, set())
        group = self._joined(role, backend, [ranks for ranks in parts if ranks not in linked])
        mine = next(sorted(ranks) for ranks in parts if self.mesh.rank in ranks)
        told = [self.mesh.members[rank] for rank in mine]
        if links is not None:
            return HostCommunicator(name, mine.index(self.mesh.rank), links, told, self.watchdog, fatal)
        if backend != "gloo":
            kernel_of(self.mesh.device)  # compiled and compared now, not inside of a step
            return NcclCommunicator(name, size, group, make_stream(self.mesh.device), self._name(group))
        return GlooCommunicator(name, size, group, self.watchdog, told, fatal, self._name(group))

    def _joined(self, role: str, backend: str, parts: Sequence[tuple[int, ...]]) -> Any:
        """The process group of this rank, of those of some parts; None if it is in none. All ranks make all of them."""
        made = [self._group(ranks, backend) for ranks in parts]
        if made and self.backend != "fake":
            # gloo connects ranks one by one: whoever failed now would close what others are still connecting.
            exchange(self._meeting(role), torch.tensor([True], device="cpu"))
        return next((group for group in made if group is not None), None)

    def _meeting(self, role: str) -> Communicator:
        """The communicator on which ranks meet to make another one.

        A program may ask for its first collective when another rank has failed before its own. That rank is at the end
        of its step, on the control communicator: there the others learn of it.
        """
        control = self.comms.get(("control", self.mesh.axis_names)) if role == COLLECTIVES else None
        return control or self._base()

    def _group(self, ranks: Sequence[int], backend: str, **options: Any) -> Any:
        """A process group; None for ranks outside of it, which must make the call, too.

        With a device PyTorch makes NCCL's communicator here, and not in the first collective, where the host would wait
        for other ranks. It splits it from that of the default group if that is bound to the device.
        """
        options |= {"timeout": self.timeout, "backend": backend}
        if backend == "nccl":
            options["device_id"] = self.mesh.device
        with without_interrupting(), self.descriptors.opening():
            group = dist.new_group([self.mesh.members[rank] for rank in ranks], **options)
        if self.mesh.rank not in ranks:
            return None
        if self.lost:  # the thread that waited for this has given up, and closed the mesh
            with suppress(Exception):
                dist.destroy_process_group(group)
            raise CommError(f"a group was made too late: {self.lost}")
        self.groups.append(group)
        return group

    def store_name(self) -> str:
        """Return what names this mesh in the store. Collective at its first call."""
        if self.backend != "fake":
            bounded(self._base, self.watchdog.timeout + GRACE, "naming a part of the mesh")
        return self.watchdog.name

    def _name(self, group: Any) -> str:
        """Return what names a process group in the store, as all of its ranks name it."""
        return str(group.group_name)

    def _connect(self, parts: Sequence[tuple[int, ...]]) -> tuple[list[PeerLink | None] | None, set[tuple[int, ...]]]:
        """Links to the ranks of this rank's part if all are on one host; and all parts of which that is true."""
        base = self._base()
        near = {ranks for ranks in parts if self.hosts[ranks[0]] and len({self.hosts[r] for r in ranks}) == 1}
        if not near:
            return None, near
        mine = next(ranks for ranks in parts if self.mesh.rank in ranks)
        links = self._links(base, mine if mine in near else ())
        there = exchange(base, torch.tensor([links is not None], device="cpu")).view(-1).tolist()
        near = {ranks for ranks in near if all(there[rank] for rank in ranks)}
        if mine not in near:
            close_links(links or ())
            return None, near
        return links, near

    def _links(self, base: Communicator, ranks: tuple[int, ...]) -> list[PeerLink | None] | None:
        """Links to these ranks; None if one cannot be made: then all of them use gloo. Collective."""
        rendezvous = Rendezvous()
        addresses = exchange_text(base, rendezvous.address, 64)
        try:
            in_order = sorted(ranks)
            return (
                rendezvous.open(in_order.index(self.mesh.rank), [addresses[rank] for rank in in_order])
                if ranks
                else None
            )
        except OSError:
            return None
        finally:
            rendezvous.close()

    def _base(self) -> Communicator:
        """The communicator over all ranks, by gloo, on which ranks exchange their hosts and calls."""
        if self.base is None:
            size = self.mesh.size
            group = self._group(range(size), "gloo")
            self.watchdog.name = self._name(group)
            self.base = GlooCommunicator("base", size, group, self.watchdog, self.mesh.members, key=self.watchdog.name)
            told = exchange_text(self.base, f"{secrets.token_hex(4)} {socket.gethostname()[:64]} {host_key()}", 256)
            jobs, names, self.hosts = map(list, zip(*(text.split(" ", 2) for text in told), strict=True))
            self.watchdog.notes.hosts = dict(zip(self.mesh.members, names, strict=True))
            self.flight.meet(jobs[0])
        return self.base


def _drop_groups(groups: list[Any]) -> None:
    """Destroy the groups of a mesh that was dropped without ``close``: torch.distributed would keep them for good.

    This runs where the garbage collector does, so it starts no thread and waits for none.
    """
    while groups and dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group(groups.pop())
