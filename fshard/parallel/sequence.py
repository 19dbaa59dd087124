"""Norms and other code on a slice of the sequence (sequence parallelism: Korthikanti et al. 2022).

Between tensor-parallel layers each rank may hold only its slice of the sequence. Leaves of such code are equal on all
ranks, and their gradient is the sum over ranks: ``shared`` takes that sum, and the norms here use it.
"""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import collectives
from fshard.arguments import expect
from fshard.parallel.plan_checks import check_whole
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P


def shared(leaf: Tensor, *, axis: str = "tp", mesh: Mesh | None = None) -> Tensor:
    """A leaf that is equal on all ranks along an axis, for use with values that differ between them.

    It is ``fs.collectives.pvary`` with a check of the plan. Without it each rank keeps the gradient of its own slice,
    and copies of the leaf drift apart; a train step with ``debug=True`` finds that.

    Args:
        leaf: the leaf, as the unit reads it.
        axis: the tensor-parallel axis.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        PlanError: inside of a step, the plan cuts the leaf by the axis, or the axis is a data axis.

    >>> mesh = fs.virtual_mesh((2,), ("tp",))
    >>> def on_a_rank():
    ...     part = torch.tensor([mesh.rank + 1.0])
    ...     return torch.func.grad(lambda w: (fs.parallel.shared(w, mesh=mesh) * part).sum())(torch.ones(1))
    >>> mesh.run(on_a_rank)  # 1 + 2 on both
    [tensor([3.]), tensor([3.])]
    """
    check_whole(leaf, axis, "shared")
    varying: Tensor = collectives.pvary(leaf, axis, mesh=mesh)
    return varying


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None = None, *, axis: str = "tp", mesh: Mesh | None = None
) -> Tensor:
    """``torch.nn.functional.rms_norm`` over the last dim of a slice of the sequence.

    Args:
        x: (..., width), each rank's own slice.
        weight: (width,), whole on every rank.
        eps: as for ``torch.nn.functional.rms_norm``.
        axis: the axis that cuts the sequence.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("tp",))
    >>> x = torch.tensor([3.0, 4.0])
    >>> [y.round(decimals=2) for y in mesh.run(lambda: fs.parallel.rms_norm(x, torch.ones(2), mesh=mesh))]
    [tensor([0.8500, 1.1300]), tensor([0.8500, 1.1300])]
    """
    return F.rms_norm(x, weight.shape, shared(weight, axis=axis, mesh=mesh), eps)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    axis: str = "tp",
    mesh: Mesh | None = None,
) -> Tensor:
    """``torch.nn.functional.layer_norm`` over the last dim of a slice of the sequence.

    Args:
        x: (..., width), each rank's own slice.
        weight: (width,), whole on every rank.
        bias: (width,), likewise.
        eps: added to the variance.
        axis: the axis that cuts the sequence.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("tp",))
    >>> x = torch.tensor([3.0, 4.0])
    >>> [y.round(decimals=2) for y in mesh.run(lambda: fs.parallel.layer_norm(x, torch.ones(2), mesh=mesh))]
    [tensor([-1.,  1.]), tensor([-1.,  1.])]
    """
    bias = None if bias is None else shared(bias, axis=axis, mesh=mesh)
    return F.layer_norm(x, weight.shape, shared(weight, axis=axis, mesh=mesh), bias, eps)


def split_sequence(x: Tensor, dim: int = 1, *, axis: str = "tp", mesh: Mesh | None = None) -> Tensor:
    """This rank's slice of a value that is equal on all ranks along the axis. Its adjoint joins the slices.

    Args:
        x: the whole value, of any shape.
        dim: the dim of the sequence.
        axis: the tensor-parallel axis.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        CollectiveError: the axis does not divide the dim.

    >>> mesh = fs.virtual_mesh((2,), ("tp",))
    >>> mesh.run(lambda: fs.parallel.split_sequence(torch.arange(4), 0, mesh=mesh))
    [tensor([0, 1]), tensor([2, 3])]
    """
    expect("split_sequence(x, dim)", [("x", x, Tensor, "a tensor"), ("dim", dim, int, "a dim of it")])
    return collectives.cut(x, P(*[None] * (dim % x.dim()), axis), mesh=mesh)


def join_sequence(x: Tensor, dim: int = 1, *, axis: str = "tp", mesh: Mesh | None = None) -> Tensor:
    """The whole sequence of these slices, equal on all ranks. Its adjoint takes this rank's slice.

    Args:
        x: this rank's slice; slices have one shape.
        dim: the dim of the sequence.
        axis: the tensor-parallel axis.
        mesh: where to look the axis up, if not on the mesh in scope.

    >>> mesh = fs.virtual_mesh((2,), ("tp",))
    >>> mesh.run(lambda: fs.parallel.join_sequence(torch.tensor([mesh.rank]), 0, mesh=mesh))
    [tensor([0, 1]), tensor([0, 1])]
    """
    whole: Tensor = collectives.all_gather(x, axis, dim=dim, tiled=True, to="invariant", mesh=mesh)
    return whole
