"""A virtual mesh: all ranks of a job in one process."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import TransformError
from fshard.hints import teaching
from fshard.played.cooperative import Randomness, Scheduler, inherited, playing
from fshard.played.everywhere import join
from fshard.played.transport import VirtualTransport
from fshard.runtime.comm.devices import keep_device_guard, own_device
from fshard.sharding.mesh import Mesh, resolve_sizes
from fshard.torch_internals import peek_interpreter_stack
from fshard.tracebacks import hide


class VirtualMesh(Mesh):
    """A mesh whose ranks are threads of this process. Made by ``fs.virtual_mesh``.

    Inside of ``run`` it is the mesh of the rank that runs. Outside the caller stands for all ranks, as in JAX: steps
    take global batches, and states show whole tensors.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh, mesh.run(lambda: mesh.rank)
    (VirtualMesh(sizes=(2,), axis_names=('data',)), [0, 1])
    """

    def __init__(self, sizes: tuple[int, ...], axis_names: tuple[str, ...], device: torch.device) -> None:
        fields = {"sizes": sizes, "axis_names": axis_names, "device": device}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def _ranks(self) -> tuple[Mesh, ...]:
        """The mesh as each rank sees it, with what joins it to the others in every run."""
        seen = [Mesh(self.sizes, self.axis_names, rank, self.device) for rank in range(self.size)]
        return tuple([dataclasses.replace(mesh, transport=VirtualTransport(mesh, self)) for mesh in seen])

    @property
    def everywhere(self) -> bool:
        """Tell whether the caller stands for all ranks, outside of ``run``."""
        thread = playing()
        return thread is None or thread.scheduler.mesh is not self

    @property
    def here(self) -> Mesh:
        """The mesh as the rank that runs sees it; itself outside of ``run``."""
        thread = playing()
        return self if thread is None or thread.scheduler.mesh is not self else self._ranks[thread.rank]

    @property
    def rank(self) -> int:
        """The rank that runs; 0 outside of ``run``."""
        here = self.here
        return 0 if here is self else here.rank

    @property
    def transport(self) -> Any:
        """The transport of the rank that runs; None outside of ``run``."""
        here = self.here
        return None if here is self else here.transport

    def __eq__(self, other: object) -> bool:
        """Equal to the mesh of the rank that runs."""
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.sizes, self.axis_names, self.rank) == (other.sizes, other.axis_names, other.rank)

    def __hash__(self) -> int:
        return hash((self.sizes, self.axis_names, self.rank, self.device))

    def __repr__(self) -> str:
        return f"VirtualMesh(sizes={self.sizes}, axis_names={self.axis_names})"

    def join(self, results: Sequence[Any]) -> Any:
        """Join the results of ``run`` to one value: states of ranks become a state of all ranks.

        Args:
            results: one for each rank, alike in structure: any nest of tuples, lists and dicts. Of what is equal on all
                ranks, and of records such as metrics, the result has that of rank 0.

        Raises:
            TreeError: a value differs between ranks, so that it is none of all ranks.

        >>> fs.virtual_mesh((2,), ("data",)).join([{"loss": 1.5}, {"loss": 1.5}])
        {'loss': 1.5}
        """
        return join(results, self.size)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank.

        One rank runs at a time, up to the next collective that it must wait for, so a run is deterministic. Inside,
        ``fs.make_mesh`` returns the mesh of the rank, so the ``main()`` of a script for torchrun runs unchanged. Every
        rank starts from the current state of the random generators, and this process continues with that of rank 0.
        Runs of several threads of a process, of one mesh or of several, come one after the other, since PyTorch's
        forward-mode level and its generators are those of the process. So no other thread may call ``torch.func.jvp``
        meanwhile.

        Args:
            fn: called as ``fn(*args, **kwargs)``. All ranks get, and share, the same objects.

        Returns:
            The result of each rank, in rank order.

        Raises:
            Exception: the exception of the first rank that failed by itself, with a note that names the rank.
            CommError: the ranks wait for each other, or disagree on a collective; the message locates each rank.
            TransformError: called under a transform of torch.func: transform the function, or use ``fs.shard_map``.

        >>> mesh = fs.virtual_mesh((3,), ("data",))
        >>> mesh.run(lambda: fs.collectives.psum(fs.collectives.axis_index("data", mesh=mesh), "data", mesh=mesh))
        [0, 3, 6]
        """
        if peek_interpreter_stack() is not None:
            raise TransformError(
                "mesh.run was called under a transform of torch.func, which does not reach the threads of ranks: make "
                "the transform inside of the function, or use fs.shard_map, which can be transformed"
            )
        expect("mesh.run(fn)", [("fn", fn, Callable, "a function; its arguments come after it")])
        return self.run_waiting(functools.partial(fn, *args, **kwargs), nullcontext)

    def run_waiting(self, fn: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]) -> list[Any]:
        """Call a function on every rank, and wait for the ranks in a context; see ``run``."""
        try:
            return play(self, fn, waiting=waiting)
        except BaseException as error:
            hide(error)
            raise


def play(
    mesh: VirtualMesh,
    fn: Callable[[], Any],
    again: Randomness | None = None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Any]:
    """Run a function on every rank of a virtual mesh; ``again`` gives it the random numbers of an earlier run."""
    keep_device_guard()
    scheduler, inherit = Scheduler(mesh), inherited()
    results: list[Any] = []

    def all_ranks(x: Tensor) -> Tensor:
        results.extend(scheduler.run([inherit(fn) for _ in range(mesh.size)], again, waiting))
        return x

    # All threads share PyTorch's forward-mode level: the first jvp opens it, and its end clears all tangents. This jvp
    # lasts as long as the run, so the end of one rank's jvp keeps the tangents of the others.
    one = torch.ones((), device="cpu")
    with _alone():
        torch.func.jvp(all_ranks, (one,), (one,))
    return results


RUNS = "_fshard_runs"
"""The attribute of the main thread that holds the lock of runs."""


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no other thread of the process plays ranks: it has one forward-mode level, and one set of generators.

    A run that a rank of another one makes is part of that.
    """
    if playing() is not None:
        yield
        return
    lock = vars(threading.main_thread()).setdefault(RUNS, threading.RLock())
    with lock:
        yield


@teaching
def virtual_mesh(sizes: Sequence[int], axis_names: Sequence[str], *, device: str | torch.device = "cpu") -> VirtualMesh:
    """A mesh whose ranks all run in this process, for notebooks and tests.

    ``mesh.run(fn)`` calls a function on every rank, and ``fs.shard_map(f, mesh, ...)`` maps global tensors. Collectives
    copy memory; everything else runs as on real ranks, with the same numbers. It is a context manager like any mesh,
    and holds no resources.

    Args:
        sizes: ranks along each axis, all positive.
        axis_names: one name an axis.
        device: the device that all ranks share, such as ``"cuda"``: one GPU plays the ranks of many.

    Raises:
        PlanError: names and sizes do not match, or the device does not exist.

    >>> with fs.virtual_mesh((2, 2), ("replica", "data")) as mesh:
    ...     mesh.run(lambda: mesh.coords())
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return VirtualMesh(resolve_sizes(sizes, axis_names, None), tuple(axis_names), own_device(device))
