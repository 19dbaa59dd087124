"""Joining a torch.distributed job: the rank, its number and its device, which ranks compare before anything is sent.

Once ranks are joined by a communicator, the kernel closes the connections of one that dies. Before that they wait for
each other in the store of the job, which knows of no death. So each rank leaves a note of its process there, and those
that wait look whether the processes of their own host still run.
"""

import datetime
import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fshard.errors import CommError, PlanError
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.devices import (
    DevicePlace,
    agree_on_places,
    choose_device,
    device_of_group,
    place_of,
    with_nccl,
)
from fshard.runtime.comm.ending import Descriptors
from fshard.runtime.comm.launchers import as_torchrun
from fshard.runtime.comm.links import host_key
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.processes import GRACE, STORE
from fshard.runtime.comm.start import VARIABLE, interface, start_name
from fshard.torch_internals import default_group, default_store

PATIENCE = 1.0
"""Seconds for an answer of the store."""

MOST = 64
"""Ranks that one looks for at most, where the environment does not tell which are on its host."""


class Alive:
    """The notes of a start.

    Args:
        store: that all ranks see.
        rank: this one.
        world: how many there are.

    Attributes:
        unread: ranks of this host, perhaps, whose notes have not been seen.
        processes: what identifies the processes of ranks of this host.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.unread = [other for other in near(rank, world) if other != rank]
        self.processes: dict[int, str] = {}
        self.store: Any = None
        with suppress(Exception):  # without a store, nobody is looked for
            self.store = store.clone()  # a store that one thread waits in answers no other
            store.set(_key(rank), f"{_host()} {os.getpid()} {born(os.getpid())}")

    def look(self) -> None:
        """Look whether a rank of this host that had come has ended.

        Raises:
            CommError: with its number.
        """
        with suppress(Exception):
            bounded(self._read, PATIENCE, "reading the notes of ranks")
        for rank, process in self.processes.items():
            pid, _, begin = process.partition(" ")
            if born(int(pid)) != begin:
                raise CommError(
                    f"rank {rank} has ended (process {pid} of this host) before the ranks were joined: see its log"
                )

    def missing(self) -> list[int]:
        """The ranks that have not come; none where the store does not answer."""

        def absent() -> list[int]:
            return [rank for rank in range(self.world) if not self.store.check([_key(rank)])]

        try:
            return bounded(absent, PATIENCE, "looking for ranks") if self.store is not None else []
        except Exception:
            return []

    def _read(self) -> None:
        for rank in [*self.unread] if self.store is not None else ():
            if self.store.check([_key(rank)]):
                host, _, process = self.store.get(_key(rank)).decode().rpartition(" | ")
                self.unread.remove(rank)
                if host and f"{host} |" == _host():
                    self.processes[rank] = process


def near(rank: int, world: int) -> Sequence[int]:
    """The ranks that may be on this rank's host: launchers give those of a host numbers in a row."""
    local, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and size.isdecimal() and 0 <= rank - int(local) <= world - int(size):
        return range(rank - int(local), rank - int(local) + int(size))
    return range(world if world <= MOST else 0)


def born(pid: int) -> str:
    """Say when a process began, in ticks since the start of the system; empty if it has ended, or nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19] if fields[0] not in ("Z", "X") else ""


def _host() -> str:
    """Equal on ranks that see each other's processes."""
    try:
        return f"{host_key()} {os.readlink('/proc/self/ns/pid')} |"
    except OSError:
        return ""


def _key(rank: int) -> str:
    return f"fshard/came/{rank}"


T = TypeVar("T")
Check = Callable[[int], object]
"""Raises a PlanError if the number of ranks is not what a rank expects."""

CLOSED = re.compile("likely closed|reset by peer|Broken pipe")
"""The store's errors of connections whose other end has ended."""

HAS = "or torchrun's agent, which has it, has ended: see its log"
"""Follows the rank that keeps the store."""

JOINING = 300.0
"""Seconds for the ranks of one host to come to the file in which they meet."""


@dataclass(frozen=True)
class Joined:
    """A rank of a job.

    Attributes:
        rank: its number.
        world: how many there are.
        device: the device that it works on, the current one if it is a CUDA device.
        backend: of its communicators.
        owned: whether the process group was made here.
        descriptors: the sockets that were opened for it.
        alive: the notes of the ranks, until a communicator joins them.
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    owned: bool
    descriptors: Descriptors
    alive: Alive | None = None


def join(timeout: float, given: str | torch.device | None, check: Check) -> Joined | None:
    """Join the job that torchrun's, srun's or mpirun's variables name, or the existing process group. Collective.

    Args:
        timeout: seconds to wait for others.
        given: the device that the user asked for.
        check: raises a PlanError if the number of ranks is not what this one expects.

    Returns:
        This rank; None without a launcher and process group.

    Raises:
        PlanError: a launcher has started several processes, and does not tell how they meet; a rank cannot join, or
            ranks are on devices that do not go together; on all ranks alike.
    """
    if dist.is_initialized():
        return _of_group(timeout, given, check)
    os.environ.update(as_torchrun(os.environ))
    if not all(map(os.environ.get, ("RANK", "WORLD_SIZE"))):
        return None
    if int(os.environ["WORLD_SIZE"]) == 1 and not all(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))):
        return None
    limit = datetime.timedelta(seconds=timeout)
    visible, local = (
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
        int(os.environ.get("LOCAL_RANK") or 0),
    )
    descriptors = Descriptors()
    with naming_errors("joining the process group"), descriptors.opening():
        store, rank, world = _in_time(lambda: _rendezvous(limit), timeout)
        alive = _come(store, rank, world)
        device = _agreed(store, rank, world, timeout, lambda: choose_device(given, visible, local), check, alive)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if name := interface(os.environ):
            os.environ[VARIABLE] = name
        _in_time(lambda: _init(backend, store, rank, world, device, limit), timeout, alive)
    return Joined(rank, world, device, backend, True, descriptors, alive)


def _of_group(timeout: float, given: str | torch.device | None, check: Check) -> Joined:
    """This rank of a process group that exists already."""
    backend, rank, world = str(dist.get_backend()), dist.get_rank(), dist.get_world_size()
    if backend == "undefined":  # one backend for each device type: NCCL for CUDA tensors, gloo for others
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl", "fake"):
        raise PlanError(f"the process group's backend is {backend!r}; fshard runs on gloo and nccl, and times on fake")
    bound = getattr(default_group(), "bound_device_id", None)
    serves = "nccl" if backend == "fake" and torch.cuda.is_available() else backend

    def choose() -> torch.device:
        return device_of_group(given, serves, bound, lambda: torch.device("cuda", torch.cuda.current_device()))

    alive = None
    if backend == "fake":
        check(world)
        device = with_nccl(choose())
    else:
        store = default_store()
        with naming_errors("joining the process group"):
            alive = _come(store, rank, world)
            device = _agreed(store, rank, world, timeout, choose, check, alive)
    chosen = "gloo" if device.type == "cpu" and backend == "nccl" else backend
    return Joined(rank, world, device, chosen, False, Descriptors(), alive)


def _come(store: Any, rank: int, world: int) -> Alive:
    """Leave this rank's note of life."""
    return bounded(lambda: Alive(store, rank, world), GRACE, "leaving a note of life in the store")


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
        _in_time(lambda: _init(backend, store, rank, world, device), timeout)


def _agreed(
    store: Any,
    rank: int,
    world: int,
    timeout: float,
    choose: Callable[[], torch.device],
    check: Check,
    alive: Alive | None = None,
) -> torch.device:
    """This rank's device, if all ranks can work on theirs. Collective."""
    failure: PlanError | None = None
    try:
        check(world)
        device = with_nccl(choose())
        place = place_of(device)
    except PlanError as error:
        place, failure = DevicePlace("", problem=str(error)), error

    def agree() -> str:
        return agree_on_places(store, rank, world, place)

    verdict = _in_time(agree, timeout, alive) if world > 1 else place.problem
    if verdict:
        raise PlanError(verdict) from failure
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _in_time(body: Callable[[], T], seconds: float, alive: Alive | None = None) -> T:
    """Join within the timeout, unless a rank ends. (A store whose host is frozen never answers.)"""
    try:
        return bounded(body, seconds + GRACE, "the start of all ranks", alive.look if alive is not None else None)
    except dist.DistNetworkError as error:
        if alive is None or not CLOSED.search(str(error)):
            raise
        alive.look()
        raise CommError(
            f"the store of the job at {_place()} has ended before the ranks were joined: rank 0 {HAS}"
        ) from error
    except (TimeoutError, dist.DistStoreError) as error:
        if alive is not None and (gone := alive.missing()):
            ranks = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone[:MOST]))}"
            raise CommError(f"{ranks} did not come to fs.make_mesh within {seconds:g} s: see their logs") from error
        if not isinstance(error, TimeoutError):
            raise
        world = dist.get_world_size() if dist.is_initialized() else os.environ["WORLD_SIZE"]
        at = STORE if dist.is_initialized() else _place()
        raise TimeoutError(
            f"{error}. Not all of {world} ranks came to the store at {at}, or its host cannot be reached: see the logs"
        ) from error


def _place() -> str:
    """The address of the store that the environment names."""
    return f"{os.environ.get('MASTER_ADDR', 'a file')}:{os.environ.get('MASTER_PORT', 'of this host')}"


def _rendezvous(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store that the environment names, with separate keys for each start, and this rank and their number."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    c10d: Any = dist  # its stores are not exported
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            next(c10d.rendezvous("env://", rank, world, timeout=timeout))  # raises, and says which is not there
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # It waits for no rank: who has not come is known by the notes of those that have.
        store = c10d.TCPStore(address, port, world, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)
        return store, rank, world
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = c10d.TCPStore(address, port, is_master=False, timeout=timeout)
    name = start_name(store, rank, world, timeout.total_seconds())
    return c10d.PrefixStore(f"fshard/{name}", store), rank, world


def _init(
    backend: str,
    store: Any,
    rank: int,
    world: int,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Make the default process group. NCCL's is bound to the device, and so made at once: others are split from it."""
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)
