"""The transport between processes of a torch.distributed job, and joining the job."""

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fshard.errors import CommError, PlanError, ScheduleError
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.calls import announce
from fshard.runtime.comm.communicator import COLLECTIVES, Communicator, SingleRank
from fshard.runtime.comm.cuts import Cuts
from fshard.runtime.comm.devices import Place, agree_on_places, choose_device, device_of_group, place_of
from fshard.runtime.comm.exchange import exchange, exchange_text
from fshard.runtime.comm.flight import flight_of
from fshard.runtime.comm.gloo import GlooCommunicator
from fshard.runtime.comm.host import HostCommunicator
from fshard.runtime.comm.links import Link, Rendezvous, close_links, host_key
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.start import start_name
from fshard.runtime.comm.streams import make_stream
from fshard.runtime.comm.watchdog import Watchdog
from fshard.sharding.mesh import Axes, Mesh

T = TypeVar("T")
Check = Callable[[int], object]
"""Raises a PlanError if the number of ranks is not what a rank expects."""

GRACE = 1.5
"""Seconds beyond the timeout for inner timeouts to be reported."""

DROPPING, PARTING = 1.0, 5.0
"""Seconds for closing connections: after a failure, and at the end."""

JOINING = 300.0
"""Seconds for the ranks of one host to come to the file in which they meet."""

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
    """

    def __init__(
        self, mesh: Mesh, backend: str, timeout: datetime.timedelta, owned: bool, shared_memory: bool = True
    ) -> None:
        self.mesh, self.backend, self.timeout, self.owned = mesh, backend, timeout, owned
        self.shared_memory = shared_memory
        self.parts: list[ProcessTransport] = []  # of replicas, closed with this one
        self.comms: dict[tuple[str, Axes], Communicator] = {}
        self.base: Communicator | None = None
        self.hosts, self.groups = list[str](), list[Any]()
        self.foreseen: dict[Axes, None] | None = None
        self.lost = ""
        self.flight = flight_of(mesh.rank, mesh.size) if mesh.whole is mesh else None
        self.watchdog = Watchdog(mesh.members[mesh.rank], timeout.total_seconds(), self.abort_all)
        self.cuts = Cuts(self.watchdog, mesh.members[mesh.rank], self._stop_waiting)

    @property
    def asynchronous(self) -> bool:
        """Whether the device may wait for other ranks while the host does not."""
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

    def program(self) -> AbstractContextManager[object]:
        """While a program of all ranks runs: over NCCL, look for notes of ranks on which it has failed."""
        return self.cuts.program() if self.asynchronous else nullcontext()

    def abort(self, role: str, reason: str = "the step failed") -> None:
        """Close the communicators of a role, so that peers that wait for this rank there get an error.

        Every rank does so sooner or later; the next call of ``communicator`` makes new ones. With NCCL peers get no
        error by that: each rank ends its own wait when it learns of the failure by the exchange of statuses, or, where
        its program does not come so far, by a note.
        """
        if role == COLLECTIVES:
            self.cuts.tell(reason)
        gone = [key for key in self.comms if key[0] == role]
        self._drop([self.comms.pop(key) for key in gone], reason)

    def _stop_waiting(self, reason: str) -> None:
        """End what the device waits for. The closed communicators stay: nobody would help to make new ones."""
        waiting = [comm for (role, _), comm in [*self.comms.items()] if role == COLLECTIVES]
        self._cut([comm for comm in waiting if isinstance(comm, NcclCommunicator)], reason)

    def abort_all(self, reason: str) -> None:
        """Close all communicators for good, so that no peer waits for this rank."""
        self.lost = self.lost or reason
        self._drop([*self.comms.values(), self.base], reason)
        for part in self.parts:
            ProcessTransport.abort_all(part, reason)

    def close(self, reason: str = "") -> None:
        """Close all communicators and destroy their groups, and the default group if ``make_mesh`` made it."""
        for part in self.parts:
            part.close(reason)
        self.watchdog.close()
        self._drop([*self.comms.values()], reason)
        self.comms.clear()
        self.base = None
        self._destroy(self.groups, PARTING)
        self.groups = []
        if self.owned and dist.is_initialized():
            with suppress(TimeoutError):
                bounded(dist.destroy_process_group, PARTING, "leaving the process group")

    def _drop(self, comms: Sequence[Communicator | None], reason: str) -> None:
        """Close communicators: first those that send peers a message, then those that leave a note in the store."""
        for comm in comms:
            if isinstance(comm, HostCommunicator):
                comm.close(reason)
        gone = []
        for comm in comms:
            if isinstance(comm, GlooCommunicator) and comm.group is not None:
                gone.append(comm.group)
                comm.close(reason)
        if reason:
            gone += self._cut([comm for comm in comms if isinstance(comm, NcclCommunicator)], reason)
        self.groups = [group for group in self.groups if not any(group is other for other in gone)]
        self._destroy(gone, DROPPING)

    def _cut(self, comms: Sequence[NcclCommunicator], reason: str) -> list[Any]:
        """Abort NCCL's collectives in flight: kernels that wait for other ranks end then."""
        groups = [group for comm in comms if (group := comm.close(reason)) is not None]
        if groups:
            with suppress(TimeoutError, RuntimeError):
                bounded(lambda: [group.abort() for group in groups], DROPPING, "aborting collectives")
        return groups

    def _destroy(self, groups: list[Any], seconds: float) -> None:
        """Destroy process groups. Their connections close with the last reference."""

        def destroy() -> None:
            while groups:
                dist.destroy_process_group(groups.pop())

        if groups and dist.is_initialized():
            with suppress(TimeoutError):
                bounded(destroy, seconds, "closing connections")

    def _made(self, role: str, axes: Axes) -> Communicator:
        """A new communicator, made within the timeout, since the host of the store may be gone."""
        self.watchdog.start()
        what = f"the communicator {role}({'+'.join(axes)})"
        try:
            with naming_errors(f"making {what}"), self.watchdog.waiting(what):
                return bounded(lambda: self._make(role, axes), self.watchdog.timeout + GRACE, f"making {what}")
        except ScheduleError:
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
            announce(self._base(), f"making the communicator {role} of {parts}")
        links, linked = self._connect(parts) if backend == "gloo" and self.shared_memory else (None, set())
        group: Any = None
        for ranks in parts:
            if ranks not in linked:
                group = self._group(ranks, backend) or group
        mine = next(sorted(ranks) for ranks in parts if self.mesh.rank in ranks)
        told = [self.mesh.members[rank] for rank in mine]
        if links is not None:
            return HostCommunicator(name, mine.index(self.mesh.rank), links, told, self.watchdog, fatal)
        if backend != "gloo":
            return NcclCommunicator(name, size, group, make_stream(self.mesh.device))
        return GlooCommunicator(name, size, group, self.watchdog, told, fatal, self._name(group))

    def _group(self, ranks: Sequence[int], backend: str, **options: Any) -> Any:
        """A process group; None for ranks outside of it, which must make the call, too."""
        options |= {"timeout": self.timeout, "backend": backend}
        group = dist.new_group([self.mesh.members[rank] for rank in ranks], **options)
        if self.mesh.rank not in ranks:
            return None
        self.groups.append(group)
        return group

    def store_name(self) -> str:
        """What names this mesh in the store. Collective at its first call."""
        if self.backend != "fake":
            bounded(self._base, self.watchdog.timeout + GRACE, "naming a part of the mesh")
        return self.watchdog.name

    def _name(self, group: Any) -> str:
        """What names a process group in the store, as all of its ranks name it."""
        return str(group.group_name)

    def _connect(self, parts: Sequence[tuple[int, ...]]) -> tuple[list[Link | None] | None, set[tuple[int, ...]]]:
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

    def _links(self, base: Communicator, ranks: tuple[int, ...]) -> list[Link | None] | None:
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
            self.hosts = list(exchange_text(self.base, host_key(), 256))
        return self.base


@dataclass(frozen=True)
class Joined:
    """A rank of a job.

    Attributes:
        rank: its number.
        world: how many there are.
        device: the device that it works on, the current one if it is a CUDA device.
        backend: of its communicators.
        owned: whether the process group was made here.
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    owned: bool


def join(timeout: float, given: str | torch.device | None, check: Check) -> Joined | None:
    """Join the job that torchrun's environment names, or use the existing process group. Collective.

    Args:
        timeout: seconds to wait for others.
        given: the device that the user asked for.
        check: raises a PlanError if the number of ranks is not what this one expects.

    Returns:
        This rank; None without torchrun and process group.

    Raises:
        PlanError: a rank cannot join, or ranks are on devices that do not go together; on all ranks alike.
    """
    if dist.is_initialized():
        return _of_group(timeout, given, check)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    limit = datetime.timedelta(seconds=timeout)
    visible, local = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ.get("LOCAL_RANK", 0))
    with naming_errors("joining the process group"):
        store, rank, world = _in_time(lambda: _rendezvous(limit), timeout)
        device = _agreed(store, rank, world, timeout, lambda: choose_device(given, visible, local), check)
        backend = "nccl" if device.type == "cuda" else "gloo"
        _in_time(lambda: _init(backend, store, rank, world, limit), timeout)
    return Joined(rank, world, device, backend, True)


def _of_group(timeout: float, given: str | torch.device | None, check: Check) -> Joined:
    """This rank of a process group that exists already."""
    backend, rank, world, c10d = str(dist.get_backend()), dist.get_rank(), dist.get_world_size(), cast(Any, dist)
    if backend == "undefined":  # one backend for each device type: NCCL for CUDA tensors, gloo for others
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl", "fake"):
        raise PlanError(f"the process group's backend is {backend!r}; fshard runs on gloo and nccl, and times on fake")
    bound = getattr(c10d.distributed_c10d._get_default_group(), "bound_device_id", None)
    serves = "nccl" if backend == "fake" and torch.cuda.is_available() else backend

    def choose() -> torch.device:
        return device_of_group(given, serves, bound, lambda: torch.device("cuda", torch.cuda.current_device()))

    if backend == "fake":
        check(world)
        device = choose()
    else:
        store = c10d.distributed_c10d._get_default_store()
        with naming_errors("joining the process group"):
            device = _agreed(store, rank, world, timeout, choose, check)
    return Joined(rank, world, device, "gloo" if device.type == "cpu" and backend == "nccl" else backend, False)


def join_by_file(path: str, rank: int, world: int, timeout: float = JOINING) -> None:
    """Make the default process group of ranks of one host, which meet in a file: no port is opened for it. Collective.

    Args:
        path: of the file, which is not there yet.
        rank: this one.
        world: how many there are.
        timeout: seconds to wait for others.

    Raises:
        PlanError: a rank has no GPU, or several ranks have one; on all ranks alike.
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    visible, c10d = torch.cuda.device_count() if torch.cuda.is_available() else 0, cast(Any, dist)
    with naming_errors("joining the process group"):
        store = c10d.FileStore(path, world)
        store.set_timeout(datetime.timedelta(seconds=timeout))
        device = _agreed(store, rank, world, timeout, lambda: choose_device(None, visible, rank), lambda world: None)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _agreed(
    store: Any,
    rank: int,
    world: int,
    timeout: float,
    choose: Callable[[], torch.device],
    check: Check,
) -> torch.device:
    """This rank's device, if all ranks can work on theirs. Collective."""
    failure: PlanError | None = None
    try:
        check(world)
        device = choose()
        place = place_of(device)
    except PlanError as error:
        place, failure = Place("", problem=str(error)), error
    verdict = _in_time(lambda: agree_on_places(store, rank, world, place), timeout) if world > 1 else place.problem
    if verdict:
        raise PlanError(verdict) from failure
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _in_time(body: Callable[[], T], seconds: float) -> T:
    """Join within the timeout. (A store whose host is frozen never answers.)"""
    try:
        return bounded(body, seconds + GRACE, "the start of all ranks")
    except TimeoutError as error:
        world, at = dist.get_world_size() if dist.is_initialized() else os.environ["WORLD_SIZE"], STORE
        if not dist.is_initialized():
            at = f"{os.environ.get('MASTER_ADDR', 'a file')}:{os.environ.get('MASTER_PORT', 'of this host')}"
        raise TimeoutError(
            f"{error}. Not all of {world} ranks came to the store at {at}, or its host cannot be reached: see the logs"
        ) from error


def _rendezvous(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store that the environment names, with separate keys for each start, and this rank and their number."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    c10d: Any = dist  # its stores are not exported
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, rank, world = next(c10d.rendezvous("env://", rank, world, timeout=timeout))
        store.set_timeout(timeout)
        return store, rank, world
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = c10d.TCPStore(address, port, is_master=False, timeout=timeout)
    name = start_name(store, rank, world, timeout.total_seconds())
    return c10d.PrefixStore(f"fshard/{name}", store), rank, world


def _init(backend: str, store: Any, rank: int, world: int, timeout: datetime.timedelta) -> None:
    """Make the default process group."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
