"""The device of a rank, and what all ranks of a job learn of it before anything else is sent."""

import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard.errors import PlanError, lines
from fshard.threads import settle, started
from fshard.torch_internals import set_cuda_device_guard

T = TypeVar("T")

KEY = "fshard/places"
LINGER, INTERVAL = 5.0, 0.02
"""Seconds that the owner of a store stays for ranks that are told a problem, and between two looks."""

OWN = "Start as many ranks a host as it has GPUs, or give each rank one by CUDA_VISIBLE_DEVICES."


@dataclass(frozen=True)
class DevicePlace:
    """A device of a host, on which a rank works.

    Attributes:
        host: the name of its host.
        gpu: what identifies its GPU among all; empty on CPU.
        problem: why it cannot work there; empty if it can.
    """

    device: str
    host: str = ""
    gpu: str = ""
    problem: str = ""


def choose_device(given: str | torch.device | None, visible: int, local_rank: int) -> torch.device:
    """The device of a rank that joins a job.

    Args:
        given: what the user asked for; None for CUDA where there is any.
        visible: CUDA devices that the process sees. If it sees one, that is the rank's, whatever its number.
        local_rank: the rank's number on its host.

    Raises:
        PlanError: there is no such device.

    >>> choose_device(None, 1, 3), choose_device("cuda", 8, 3), choose_device(None, 0, 3)
    (device(type='cuda', index=0), device(type='cuda', index=3), device(type='cpu'))
    """
    device = read_device(given if given is not None else "cuda" if visible else "cpu")
    if device.type != "cuda":
        return device
    if not visible:
        raise PlanError(
            f"device={str(device)!r}, and this process sees no CUDA device (torch.cuda.is_available() is False): "
            f"install PyTorch for CUDA, look at nvidia-smi and CUDA_VISIBLE_DEVICES, or give device='cpu'"
        )
    if device.index is None and local_rank >= visible > 1:
        raise PlanError(f"LOCAL_RANK={local_rank}, and this process sees {visible} GPUs: no GPU is left for it. {OWN}")
    index = device.index if device.index is not None else (local_rank if visible > 1 else 0)
    if index >= visible:
        raise PlanError(f"device='cuda:{index}', and this process sees {visible} GPUs: give one of 0 to {visible - 1}")
    return torch.device("cuda", index)


def device_of_group(
    given: str | torch.device | None, backend: str, bound: torch.device | None, current: Callable[[], torch.device]
) -> torch.device:
    """The device of a rank whose process group exists already.

    Args:
        given: what the user asked for.
        backend: of the process group.
        bound: the device that the user gave to ``init_process_group(device_id=)``.
        current: returns the current CUDA device; called where CUDA is used.

    Raises:
        PlanError: the process group does not serve the device, or is bound to another one.
    """
    default = "cuda" if bound is not None or backend == "nccl" else "cpu"
    device = read_device(given if given is not None else default)
    if device.type != "cuda":
        return device
    if backend == "gloo":
        raise PlanError(
            f"device={str(device)!r} with a process group of gloo, which serves tensors of the CPU: call "
            f"init_process_group('nccl'), or leave joining to fs.make_mesh"
        )
    found = bound if bound is not None and bound.type == "cuda" else current()
    if bound is not None and device.index not in (None, bound.index):
        raise PlanError(
            f"device={str(device)!r} with a process group that is bound to {bound} by init_process_group(device_id=): "
            f"give the same, or leave device= out"
        )
    return found if device.index is None else device


def own_device(given: str | torch.device | None) -> torch.device:
    """The device of a process that has no job, which becomes the current one: ``"cuda"`` is the current one.

    Raises:
        PlanError: there is no such device.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(given, visible, torch.cuda.current_device() if visible else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def with_nccl(device: torch.device) -> torch.device:
    """The given device, if this build of PyTorch can communicate from it.

    Raises:
        PlanError: it is a GPU, and this build of PyTorch has no NCCL.
    """
    if device.type == "cuda" and not dist.is_nccl_available():
        raise PlanError(
            f"ranks on GPUs communicate by NCCL, and this build of PyTorch has only {', '.join(available_backends())}: "
            f"install one with NCCL, or give device='cpu'"
        )
    return device


def read_device(given: str | torch.device) -> torch.device:
    """A device that the user named.

    Raises:
        PlanError: it is none, or holds no values.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"device={given!r} is no device: give 'cpu', 'cuda', 'cuda:1' or a torch.device") from error
    if device.type == "meta":
        raise PlanError("device='meta' holds no values: fs.abstract_mesh plans without a device")
    return device


def place_of(device: torch.device) -> DevicePlace:
    """Say where this rank works, on a device that exists."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return DevicePlace(str(device), socket.gethostname(), gpu)


def problem_of(places: Sequence[DevicePlace]) -> str:
    """List what is wrong with the places of all ranks; empty if nothing is.

    >>> first, other = DevicePlace("cuda:0", "a", "GPU-1"), DevicePlace("cuda:0", "b", "GPU-2")
    >>> print(problem_of([first, other, first]))
    several ranks are on one GPU:
      ranks 0, 2: cuda:0 of host a (GPU-1)
    Start as many ranks a host as it has GPUs, or give each rank one by CUDA_VISIBLE_DEVICES.
    """
    told = _by_value({rank: place.problem for rank, place in enumerate(places) if place.problem})
    if len(told) == 1 and len(next(iter(told.values()))) == len(places):
        return next(iter(told))
    if told:
        return lines("ranks cannot join the mesh:", _rows(told), "No rank has joined it.")
    kinds = _by_value({rank: place.device.partition(":")[0] for rank, place in enumerate(places)})
    if len(kinds) > 1:
        remedy = "All ranks of a mesh use one kind: give device='cpu' or device='cuda' on all of them."
        return lines("ranks are on devices of different kinds:", _rows(kinds), remedy)
    shared = _by_value({rank: place.gpu for rank, place in enumerate(places) if place.gpu})
    several = {gpu: ranks for gpu, ranks in shared.items() if len(ranks) > 1}
    if not several:
        return ""
    named = {f"{places[some[0]].device} of host {places[some[0]].host} ({gpu})": some for gpu, some in several.items()}
    return lines("several ranks are on one GPU:", _rows(named), OWN)


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _rows(ranks: Mapping[str, Sequence[int]]) -> list[str]:
    return [f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}: {what}" for what, some in ranks.items()]


def agree_on_places(store: Any, rank: int, world: int, mine: DevicePlace) -> str:
    """Tell rank 0 this rank's place, and return what is wrong with those of all; empty if nothing is. Collective.

    Only the store is used: ranks that chose different backends can still tell each other.
    """
    prefix = f"{KEY}/{store.add(f'{KEY}/turn/{rank}', 1)}"
    store.set(f"{prefix}/{rank}", json.dumps(asdict(mine)))
    if rank:
        verdict = str(store.get(f"{prefix}/verdict").decode())
        if verdict:
            store.add(f"{prefix}/told", 1)
        return verdict
    verdict = problem_of([DevicePlace(**json.loads(store.get(f"{prefix}/{other}"))) for other in range(world)])
    store.set(f"{prefix}/verdict", verdict)
    if verdict:  # the store may end with this process
        deadline = time.monotonic() + LINGER
        while store.add(f"{prefix}/told", 0) < world - 1 and time.monotonic() < deadline:
            time.sleep(INTERVAL)
    return verdict


def carried(body: Callable[[], T]) -> Callable[[], T]:
    """A function for another thread, which runs on the current CUDA device of this thread.

    A new thread begins on device 0: its first call of CUDA would open a context there, of some hundred megabytes.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return body
    device = torch.cuda.current_device()

    def run() -> T:
        torch.cuda.set_device(device)
        return body()

    return run


@functools.cache
def keep_device_guard() -> None:
    """Let threads that end make tensors without data, where PyTorch is built for CUDA and there is no GPU.

    The first ``FakeTensorMode`` then gives the whole process a guard of CUDA devices that belongs to its thread, and
    ends with it: the next one reads freed memory, and the process dies. So a thread that never ends makes it.
    """
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not built or torch.cuda.is_available():
        return
    made: Future[None] = Future()

    def make() -> None:
        settle(made, set_cuda_device_guard)
        threading.Event().wait()

    started(make, "a guard of CUDA devices")
    made.result()


def available_backends() -> list[str]:
    """The backends of this build of PyTorch."""
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, there in found.items() if there]
