"""Collectives in two parts, for explicit schedules: start one, compute something else, then take the result.

::

    flying = all_gather_start(weight, "data", tiled=True)
    y = first(x)                    # runs while the weight is on its way
    z = second(y, done(flying))

Between the two the tensor must not be written to. Both are differentiable by torch.autograd, with the adjoint of the
undivided form. Under a transform of torch.func, which hides the data that a start needs, they raise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import kind
from fshard.collectives import make_linear
from fshard.collectives.linear import Gather, Linear, LinearCollective, LinearSum, Vary, apply, check_plain
from fshard.collectives.make_linear import untraced
from fshard.collectives.raw import Finish
from fshard.collectives.scope import AxisName, resolve
from fshard.errors import CollectiveError
from fshard.sharding.mesh import Mesh


@dataclass(eq=False)
class InFlight:
    """A collective under way. ``done`` takes its result, once.

    >>> with fs.collectives.use_mesh(fs.make_mesh((1,), ("data",))):
    ...     flying = fs.collectives.psum_start(torch.ones(2), "data")
    ...     fs.collectives.done(flying)
    tensor([1., 1.])
    """

    op: LinearCollective
    x: Tensor
    version: int
    finish: Finish | None

    def run(self, x: Tensor) -> Tensor:
        """The result for ``x``, the tensor that it was started with. Raises CollectiveError the second time."""
        if self.finish is None:
            raise CollectiveError("done: the result of this collective was taken before; keep the tensor")
        if self.x._version != self.version:
            raise CollectiveError("done: the tensor was written to while it was on its way; write to a copy")
        finish, self.finish = self.finish, None
        return finish()


class Finished(Linear):
    """``Linear`` with a forward that was started before."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Its derivative is that of the undivided collective."""
        ctx.op = inputs[1].op


@untraced
def done(flying: InFlight) -> Tensor:
    """Wait for a collective and take its result.

    Args:
        flying: what one of the ``_start`` functions returned.

    Raises:
        CollectiveError: it was taken before, or the tensor has been written to since.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.done(fs.collectives.psum_start(torch.tensor(mesh.rank + 1), "data", mesh=mesh)))
    [tensor(3), tensor(3)]
    """
    if not isinstance(flying, InFlight):
        raise CollectiveError(f"done takes what one of the _start functions returned, not {kind(flying)}")
    result: Tensor = Finished.apply(flying.x, flying)  # type: ignore[no-untyped-call]
    implicit = flying.op.group.implicit and isinstance(flying.op, LinearSum)
    return apply(result, Vary(flying.op.group)) if implicit else result


@untraced
def psum_start(x: Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> InFlight:
    """Start ``psum``. Large tensors take two messages, of which the second starts in ``done``.

    Args:
        x: a tensor of any shape, whose dtype can be added.
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.done(fs.collectives.psum_start(torch.ones(2), "data", mesh=mesh)))
    [tensor([2., 2.]), tensor([2., 2.])]
    """
    make_linear.check_addable(x, "psum_start")
    return _start(x, LinearSum(resolve(axis, mesh)))


@untraced
def all_gather_start(x: Tensor, axis: AxisName, *, dim: int = 0, mesh: Mesh | None = None) -> InFlight:
    """Start ``all_gather(..., tiled=True)``.

    Args:
        x: a tensor of any shape, equal on all ranks of the axis.
        axis: the name of an axis, or a tuple of names.
        dim: the dim along which slices are joined.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> start = lambda: fs.collectives.all_gather_start(torch.tensor([mesh.rank]), "data", mesh=mesh)
    >>> mesh.run(lambda: fs.collectives.done(start()))
    [tensor([0, 1]), tensor([0, 1])]
    """
    return _start(x, Gather(resolve(axis, mesh), make_linear.dim_of(x, dim, "all_gather_start")))


@untraced
def psum_scatter_start(x: Tensor, axis: AxisName, *, dim: int = 0, mesh: Mesh | None = None) -> InFlight:
    """Start ``psum_scatter(..., tiled=True)``.

    Args:
        x: a tensor, whose dim ``dim`` the axis divides.
        axis: the name of an axis, or a tuple of names.
        dim: the dim that is cut into slices, one a rank.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.done(fs.collectives.psum_scatter_start(torch.arange(4), "data", mesh=mesh)))
    [tensor([0, 2]), tensor([4, 6])]
    """
    return _start(x, make_linear.scatter_op(x, resolve(axis, mesh), dim, True, "psum_scatter_start"))


@untraced
def all_to_all_start(
    x: Tensor, axis: AxisName, split_dim: int, concat_dim: int, *, mesh: Mesh | None = None
) -> InFlight:
    """Start ``all_to_all(..., tiled=True)``.

    Args:
        x: a tensor, whose dim ``split_dim`` the axis divides.
        axis: the name of an axis, or a tuple of names.
        split_dim: the dim that is cut, one slice for each rank.
        concat_dim: the dim along which received slices are joined.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> start = lambda: fs.collectives.all_to_all_start(torch.arange(2) + 10 * mesh.rank, "data", 0, 0, mesh=mesh)
    >>> mesh.run(lambda: fs.collectives.done(start()))
    [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    return _start(x, make_linear.exchange_op(x, resolve(axis, mesh), split_dim, concat_dim, True, "all_to_all_start"))


@untraced
def ppermute_start(x: Tensor, axis: AxisName, perm: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> InFlight:
    """Start ``ppermute``.

    Args:
        x: a tensor of any shape, equal on all ranks of the axis.
        axis: the name of an axis, or a tuple of names.
        perm: pairs of a source and a target, positions along the axis; ranks that receive nothing get zeros.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> swap = [(0, 1), (1, 0)]
    >>> start = lambda: fs.collectives.ppermute_start(torch.tensor(mesh.rank + 1), "data", swap, mesh=mesh)
    >>> mesh.run(lambda: fs.collectives.done(start()))
    [tensor(2), tensor(1)]
    """
    return _start(x, make_linear.permute(resolve(axis, mesh), perm))


def _start(x: Tensor, op: LinearCollective) -> InFlight:
    what = f"{op.name}_start"
    check_plain(make_linear.tensor(x, what), what)
    with torch.no_grad():
        return InFlight(op, x, x._version, op.begin(x.detach()))
