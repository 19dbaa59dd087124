"""Collectives over the axes of a mesh: JAX's names and meaning, PyTorch's ``dim=``, right under every transform.

Each takes a tensor, or a pytree of tensors of which it treats each alike, and the name of an axis or a tuple of names,
which count as one axis whose last name runs fastest. The axis is looked up on ``mesh=``, or on the mesh in scope: that
of the enclosing ``fs.shard_map``, train step or ``fs.func.sharded_loss``, or of ``use_mesh``. All ranks along the axis
must make the same calls in the same order, with tensors of equal shapes and dtypes.

A value is *varying* over an axis if each rank has its own, *invariant* if it is a single value of which all ranks hold
a copy. Types and adjoints, for a linear map of all ranks' values together:

================================ ======================= ==============================================
``psum``, ``pmean``              varying -> invariant    ``pvary`` (divided by the size for ``pmean``)
``pvary``                        invariant -> varying    ``psum``
``all_gather``                   varying -> varying      ``psum_scatter``
``all_gather(to="invariant")``   varying -> invariant    this rank's slice
``psum_scatter``                 varying -> varying      ``all_gather``
``all_to_all``                   varying -> varying      ``all_to_all`` back
``ragged_all_to_all``            varying -> varying      ``ragged_all_to_all`` back
``ppermute``                     varying -> varying      ``ppermute`` back
``cut``                          invariant -> varying    ``assemble``
``assemble``                     varying -> invariant    ``cut``
``pmax``                         varying -> invariant    none: differentiating it raises
================================ ======================= ==============================================

**Inside of fs.shard_map, and over the data axes inside of loss functions, every value is varying**: what these
functions make invariant passes through ``pvary`` at once, so the adjoint of ``psum`` is ``psum`` there, and ``pvary``
itself does nothing. Gradients are then right without any care. **Elsewhere** (``mesh=``, ``use_mesh``) the table holds
as it stands: a result of ``psum`` that is combined with varying values must be passed through ``pvary`` first, or its
gradient misses the other ranks' part.
"""

from fshard.collectives.api import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
)
from fshard.collectives.scope import use_mesh
from fshard.collectives.specs import assemble, cut
from fshard.collectives.startdone import (
    InFlight,
    all_gather_start,
    all_to_all_start,
    done,
    ppermute_start,
    psum_scatter_start,
    psum_start,
)

__all__ = [
    "InFlight",
    "all_gather",
    "all_gather_start",
    "all_to_all",
    "all_to_all_start",
    "assemble",
    "axis_index",
    "axis_size",
    "cut",
    "done",
    "pmax",
    "pmean",
    "ppermute",
    "ppermute_start",
    "psum",
    "psum_scatter",
    "psum_scatter_start",
    "psum_start",
    "pvary",
    "ragged_all_to_all",
    "use_mesh",
]


def __dir__() -> list[str]:
    return sorted(__all__)
