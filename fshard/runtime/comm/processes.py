"""The transport between processes of a torch.distributed job, and joining the job."""

import datetime
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fshard.errors import CommError, PlanError, ScheduleError
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.calls import announce
from fshard.runtime.comm.communicator import COLLECTIVES, Communicator, SingleRank
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
    """

    def __init__(
        self, mesh: Mesh, backend: str, timeout: datetime.timedelta, owned: bool, shared_memory: bool = True
    ) -> None:
        self.mesh, self.backend, self.timeout, self.owned = mesh, backend, timeout, owned
        self.shared_memory = shared_memory
        self.comms: dict[tuple[str, Axes], Communicator] = {}
        self.base: Communicator | None = None
        self.hosts: list[str] = []
        self.groups: list[Any] = []
        self.foreseen: dict[Axes, None] | None = None
        self.lost = ""
        self.flight = flight_of(mesh.rank, mesh.size)
        self.watchdog = Watchdog(mesh.rank, timeout.total_seconds(), self.abort_all)

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """The communicator of this role over these axes."""
        if self.mesh.axis_size(axes) == 1:
            return SingleRank()
        if self.lost:
            raise CommError(f"no rank of this mesh can be reached any more: {self.lost}")
        if (role, axes) not in self.comms:
            self.comms[role, axes] = self._made(role, axes)
        return self.comms[role, axes]

    def abort(self, role: str, reason: str = "the step failed") -> None:
        """Close the communicators of a role, so that peers that wait for this rank there get an error.

        Every rank does so sooner or later; the next call of ``communicator`` makes new ones. NCCL communicators are not
        closed: they time out.
        """
        gone = [
            key
            for key, comm in self.comms.items()
            if key[0] == role and isinstance(comm, HostCommunicator | GlooCommunicator)
        ]
        self._drop([self.comms.pop(key) for key in gone], reason)

    def abort_all(self, reason: str) -> None:
        """Close all communicators for good, so that no peer waits for this rank."""
        self.lost = self.lost or reason
        self._drop([*self.comms.values(), self.base], reason)

    def close(self, reason: str = "") -> None:
        """Close all communicators and destroy their groups, and the default group if ``make_mesh`` made it."""
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
        self.groups = [group for group in self.groups if not any(group is other for other in gone)]
        self._destroy(gone, DROPPING)

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
            with self.watchdog.explaining(range(self.mesh.size), fatal=True):
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
        if links is not None:
            return HostCommunicator(name, mine.index(self.mesh.rank), links, mine, self.watchdog, fatal)
        if backend != "gloo":
            return NcclCommunicator(name, size, group, make_stream(self.mesh.device))
        return GlooCommunicator(name, size, group, self.watchdog, mine, fatal, group.group_name)

    def _group(self, ranks: Sequence[int], backend: str) -> Any:
        """A process group; None for ranks outside of it, which must make the call, too."""
        group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
        if self.mesh.rank not in ranks:
            return None
        self.groups.append(group)
        return group

    def _connect(self, parts: Sequence[tuple[int, ...]]) -> tuple[list[Link | None] | None, set[tuple[int, ...]]]:
        """Links to the ranks of this rank's part if all are on one host; and all parts of which that is true."""
        base = self._base()
        near = {ranks for ranks in parts if self.hosts[ranks[0]] and len({self.hosts[r] for r in ranks}) == 1}
        if not near:
            return None, near
        mine = next(ranks for ranks in parts if self.mesh.rank in ranks)
        links = self._links(base, mine if mine in near else ())
        there = exchange(base, torch.tensor([links is not None])).view(-1).tolist()
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
            self.watchdog.name = group.group_name
            self.base = GlooCommunicator("base", size, group, self.watchdog, range(size), key=group.group_name)
            self.hosts = list(exchange_text(self.base, host_key(), 256))
        return self.base


def join(timeout: float) -> tuple[int, int, torch.device, str, bool] | None:
    """Join the job that torchrun's environment names, or use the existing process group.

    Returns:
        ``(rank, world, device, backend, whether it was made here)``, or None without torchrun and process group.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        with naming_errors("joining the process group"):
            _joined("nccl" if cuda else "gloo", datetime.timedelta(seconds=timeout))
        owned = True
    else:
        owned = False
    backend = str(dist.get_backend())
    if backend == "undefined":  # one backend for each device type: NCCL for CUDA tensors, gloo for others
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl", "fake"):
        raise PlanError(f"the process group's backend is {backend!r}; fshard runs on gloo and nccl, and times on fake")
    gpu = backend == "nccl" or (backend == "fake" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return dist.get_rank(), dist.get_world_size(), device, backend, owned


def join_by_file(path: str, rank: int, world: int) -> None:
    """Make the default process group of ranks of one host, which meet in a file: no port is opened for it."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    with naming_errors("joining the process group"):
        dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{path}", rank=rank, world_size=world)


def _joined(backend: str, timeout: datetime.timedelta) -> None:
    """Join within the timeout. (A store whose host is frozen never answers.)"""
    try:
        bounded(lambda: _init(backend, timeout), timeout.total_seconds() + GRACE, "the start of all ranks")
    except TimeoutError as error:
        world, at = os.environ["WORLD_SIZE"], f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TimeoutError(
            f"{error}. Not all of {world} ranks came to the store at {at}, or its host cannot be reached: see the logs"
        ) from error


def _init(backend: str, timeout: datetime.timedelta) -> None:
    """Join the process group that the environment names, with separate keys in the store for each start."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    c10d: Any = dist  # its stores are not exported
    store = c10d.TCPStore(address, port, is_master=False, timeout=timeout)
    prefix = c10d.PrefixStore(f"fshard/{start_name(store, rank, world, timeout.total_seconds())}", store)
    dist.init_process_group(backend, store=prefix, rank=rank, world_size=world, timeout=timeout)
