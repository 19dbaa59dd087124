"""Real meshes: joining the ranks that torchrun, or ``fs.launch``, started."""

import dataclasses
import datetime
from collections.abc import Sequence

import torch

from fshard.arguments import Want, expect
from fshard.errors import CommError, PlanError
from fshard.hints import teaching
from fshard.played.cooperative import playing
from fshard.played.transport import VirtualTransport
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.runtime.comm.devices import own_device, read_device
from fshard.runtime.comm.joining import join
from fshard.runtime.comm.part_transport import MeshTransport
from fshard.sharding.mesh import Mesh, resolve_sizes
from fshard.tracebacks import shorten


@teaching
def make_mesh(
    sizes: Sequence[int],
    axis_names: Sequence[str],
    *,
    timeout: float = 300.0,
    shared_memory: bool = True,
    device: str | torch.device | None = None,
) -> Mesh:
    """The mesh of this job's ranks (``jax.make_mesh``).

    Under torchrun it joins the process group: NCCL if it works on GPUs, else gloo. Under ``srun`` and ``mpirun`` it
    does so by their variables, from which it sets torchrun's. A process group that exists already is used. Without any
    of them the mesh has one rank, so scripts and notebooks run everywhere. Inside of ``fs.virtual_mesh(...).run`` it is
    the virtual mesh. Collective: before anything else is sent, ranks compare their devices by the store of the job.

    Args:
        sizes: the number of ranks along each axis; one may be ``-1`` for the rest of the world.
        axis_names: one name an axis.
        timeout: seconds after which a collective that does not finish raises ``CommError``.
        shared_memory: let CPU ranks of one host communicate through shared memory. False uses gloo for everything.
        device: the device of this rank: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a ``torch.device``. The default is CUDA
            where the process sees a CUDA device, else the CPU. ``"cuda"`` is the GPU that ``LOCAL_RANK`` numbers, or
            the only one that the process sees; with a process group that exists, its ``device_id``, or the current
            device. A CUDA device becomes the current one.

    Returns:
        This rank's mesh. ``mesh.close()`` leaves the process group; the mesh is also a context manager.

    Raises:
        PlanError: the sizes do not fit the world; a rank has no such device; ranks are on devices of different kinds,
            or several on one GPU; a launcher started several processes, and nothing tells how they meet. On all ranks
            alike.

    >>> fs.make_mesh((-1,), ("data",)).size
    1
    """
    wants: list[Want] = [
        ("timeout", timeout, (int, float), "seconds, such as 300.0"),
        ("shared_memory", shared_memory, bool, "True or False"),
    ]
    expect("make_mesh(sizes, axis_names)", wants)
    if not timeout > 0:
        raise PlanError(f"timeout={timeout} must be a positive number of seconds")
    thread = playing()
    if thread is not None:  # a rank of fs.virtual_mesh
        whole = thread.scheduler.mesh
        if device is not None and read_device(device).type != whole.device.type:
            raise PlanError(
                f"device={str(device)!r} inside of a virtual mesh on {whole.device}: give the device to fs.virtual_mesh"
            )
        mesh = Mesh(resolve_sizes(sizes, axis_names, whole.size), tuple(axis_names), thread.rank, whole.device)
        return dataclasses.replace(mesh, transport=VirtualTransport(mesh, whole))
    try:
        return _joined(sizes, axis_names, timeout, device, shared_memory)
    except CommError as error:
        shorten(error)
        raise


def _joined(
    sizes: Sequence[int],
    axis_names: Sequence[str],
    timeout: float,
    device: str | torch.device | None,
    shared_memory: bool,
) -> Mesh:
    """The mesh of this rank of the job that the environment names."""
    joined = join(timeout, device, lambda world: resolve_sizes(sizes, axis_names, world))
    if joined is None:
        resolved = resolve_sizes(sizes, axis_names, 1)
        return Mesh(resolved, tuple(axis_names), 0, own_device(device), SingleRankTransport())
    mesh = Mesh(resolve_sizes(sizes, axis_names, joined.world), tuple(axis_names), joined.rank, joined.device)
    limit = datetime.timedelta(seconds=timeout)
    transport = MeshTransport(mesh, joined.backend, limit, joined.owned, shared_memory, descriptors=joined.descriptors)
    if joined.alive is not None:
        transport.meet(joined.alive.look)
    return dataclasses.replace(mesh, transport=transport)
