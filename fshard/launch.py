"""Real meshes: joining the ranks that torchrun, or ``fs.launch``, started."""

import dataclasses
import datetime
from collections.abc import Sequence

import torch

from fshard.played.cooperative import playing
from fshard.played.transport import VirtualTransport
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.comm.processes import ProcessTransport, join
from fshard.sharding.mesh import Mesh, resolve_sizes


def make_mesh(
    sizes: Sequence[int], axis_names: Sequence[str], *, timeout: float = 300.0, shared_memory: bool = True
) -> Mesh:
    """The mesh of this job's ranks (``jax.make_mesh``).

    Under torchrun it joins the process group: NCCL if CUDA is available, else gloo. A process group that exists already
    is used. Without torchrun the mesh has one rank, so scripts and notebooks run everywhere. Inside of
    ``fs.virtual_mesh(...).run`` it is the virtual mesh.

    Args:
        sizes: the number of ranks along each axis; one may be ``-1`` for the rest of the world.
        axis_names: one name an axis.
        timeout: seconds after which a collective that does not finish raises ``CommError``.
        shared_memory: let CPU ranks of one host communicate through shared memory. False uses gloo for everything.

    Returns:
        This rank's mesh. ``mesh.close()`` leaves the process group; the mesh is also a context manager.

    Raises:
        PlanError: the sizes do not fit the world.

    >>> make_mesh((-1,), ("data",)).size
    1
    """
    thread = playing()
    if thread is not None:  # a rank of fs.virtual_mesh
        mesh = Mesh(resolve_sizes(sizes, axis_names, thread.scheduler.size), tuple(axis_names), thread.rank)
        return dataclasses.replace(mesh, transport=VirtualTransport(mesh, thread.scheduler.mesh))
    joined = join(timeout)
    if joined is None:
        resolved = resolve_sizes(sizes, axis_names, 1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return Mesh(resolved, tuple(axis_names), 0, device, SingleRankTransport())
    rank, world, device, backend, owned = joined
    mesh = Mesh(resolve_sizes(sizes, axis_names, world), tuple(axis_names), rank, device)
    transport = ProcessTransport(mesh, backend, datetime.timedelta(seconds=timeout), owned, shared_memory)
    return dataclasses.replace(mesh, transport=transport)
