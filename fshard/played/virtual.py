"""A virtual mesh: all ranks of a job in one process."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import TransformError
from fshard.played.cooperative import Randomness, Scheduler, inherited, playing
from fshard.played.transport import VirtualTransport
from fshard.sharding.mesh import Mesh, resolve_sizes


class VirtualMesh(Mesh):
    """A mesh whose ranks are threads of this process. Made by ``fs.virtual_mesh``.

    Inside of ``run`` it is the mesh of the rank that runs, outside an abstract mesh, seen from rank 0.
    """

    def __init__(self, sizes: tuple[int, ...], axis_names: tuple[str, ...]) -> None:
        fields = {"sizes": sizes, "axis_names": axis_names, "device": torch.device("cpu")}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def rank(self) -> int:
        """The rank that runs; 0 outside of ``run``."""
        thread = playing()
        return thread.rank if thread is not None and thread.scheduler.mesh is self else 0

    @property
    def transport(self) -> Any:
        """The transport of the rank that runs; None outside of ``run``."""
        thread = playing()
        return (
            VirtualTransport(self, thread.scheduler) if thread is not None and thread.scheduler.mesh is self else None
        )

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank.

        One rank runs at a time, up to the next collective that it must wait for, so a run is deterministic. Inside,
        ``fs.make_mesh`` returns the mesh of the rank, so the ``main()`` of a script for torchrun runs unchanged. Every
        rank starts from the current state of the random generators, and this process continues with that of rank 0.

        Args:
            fn: called as ``fn(*args, **kwargs)``. All ranks get, and share, the same objects.

        Returns:
            The result of each rank, in rank order.

        Raises:
            Exception: the exception of the first rank that failed by itself, with a note that names the rank.
            CommError: the ranks wait for each other, or disagree on a collective; the message locates each rank.
            TransformError: called under a transform of torch.func: transform the function, or use ``fs.shard_map``.

        >>> from fshard.collectives import axis_index, psum
        >>> mesh = virtual_mesh((3,), ("data",))
        >>> mesh.run(lambda: psum(axis_index("data", mesh=mesh), "data", mesh=mesh))
        [0, 3, 6]
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise TransformError(
                "mesh.run was called under a transform of torch.func, which does not reach the threads of ranks: make "
                "the transform inside of the function, or use fs.shard_map, which can be transformed"
            )
        expect("mesh.run(fn)", [("fn", fn, Callable, "a function; its arguments come after it")])
        return play(self, functools.partial(fn, *args, **kwargs))


def play(mesh: VirtualMesh, fn: Callable[[], Any], again: Randomness | None = None) -> list[Any]:
    """Run a function on every rank of a virtual mesh; ``again`` gives it the random numbers of an earlier run."""
    scheduler, inherit = Scheduler(mesh), inherited()
    results: list[Any] = []

    def all_ranks(x: Tensor) -> Tensor:
        results.extend(scheduler.run([inherit(fn) for _ in range(mesh.size)], again))
        return x

    # All threads share PyTorch's forward-mode level: the first jvp opens it, and its end clears all tangents. This jvp
    # lasts as long as the run, so the end of one rank's jvp keeps the tangents of the others.
    one = torch.ones(())
    torch.func.jvp(all_ranks, (one,), (one,))
    return results


def virtual_mesh(sizes: Sequence[int], axis_names: Sequence[str]) -> VirtualMesh:
    """A mesh whose ranks all run in this process, for notebooks and tests.

    ``mesh.run(fn)`` calls a function on every rank, and ``fs.shard_map(f, mesh, ...)`` maps global tensors. Collectives
    copy memory; everything else runs as on real ranks, with the same numbers. It is a context manager like any mesh,
    and holds no resources.

    Args:
        sizes: ranks along each axis, all positive.
        axis_names: one name an axis.

    Raises:
        PlanError: names and sizes do not match.

    >>> with virtual_mesh((2, 2), ("replica", "data")) as mesh:
    ...     mesh.run(lambda: mesh.coords())
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return VirtualMesh(resolve_sizes(sizes, axis_names, None), tuple(axis_names))
