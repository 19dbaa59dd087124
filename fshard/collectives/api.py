"""The public collectives: arguments are checked, names looked up, and a linear map applied to each tensor."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.collectives import linear, make_linear
from fshard.collectives.make_linear import untraced
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import AxisName, resolve
from fshard.collectives.ties import applied
from fshard.errors import CollectiveError
from fshard.sharding.mesh import Mesh
from fshard.tree import Tree


@untraced
def psum(x: Tree, axis: AxisName, *, mesh: Mesh | None = None) -> Tree:
    """The sum over an axis (``jax.lax.psum``). Varying -> invariant; its adjoint is ``pvary``.

    Ranks are added in order, so all of them get the same bits. A Python number counts once for each rank.

    Args:
        x: a tensor of any shape, or a pytree of tensors and numbers. Bools must be cast first.
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: ``x`` holds something that has no sum.

    >>> fs.collectives.psum(torch.ones(2), "data", mesh=fs.make_mesh((1,), ("data",)))
    tensor([1., 1.])
    """
    group = resolve(axis, mesh)
    return tree.mapped(lambda leaf: _sum(leaf, group, "psum"), x)


@untraced
def pmean(x: Tree, axis: AxisName, *, mesh: Mesh | None = None) -> Tree:
    """The mean over an axis (``jax.lax.pmean``): ``psum`` divided by the size. Varying -> invariant; its adjoint is
    ``pvary`` divided by the size.

    Args:
        x: a floating-point or complex tensor of any shape, or a pytree of tensors and numbers.
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError, CollectiveError: as for ``psum``; integers have no mean of their own dtype.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.pmean(torch.tensor(float(mesh.rank)), "data", mesh=mesh))
    [tensor(0.5000), tensor(0.5000)]
    """
    group = resolve(axis, mesh)

    def mean(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not linear.differentiable(leaf):
            raise CollectiveError(f"pmean of a tensor of {leaf.dtype}: cast it to a floating-point dtype, or use psum")
        return _sum(leaf, group, "pmean") / group.size

    return tree.mapped(mean, x)


@untraced
def pmax(x: Tree, axis: AxisName, *, mesh: Mesh | None = None) -> Tree:
    """The largest over an axis, element by element; nan wins (``jax.lax.pmax``). Varying -> invariant.

    It has no derivative, and says so if one is asked for: give it ``x.detach()`` where it is a constant.

    Args:
        x: a real tensor of any shape, or a pytree of tensors and numbers.
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError, CollectiveError: as for ``psum``; complex numbers are not ordered.
        TransformError: on differentiation.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.pmax(torch.tensor(mesh.rank), "data", mesh=mesh))
    [tensor(1), tensor(1)]
    """
    group = resolve(axis, mesh)

    def largest(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return make_linear.number(leaf, "pmax")
        if leaf.is_complex():
            raise CollectiveError("pmax of complex numbers: they have no order; take their real part or absolute value")
        return linear.apply(leaf, linear.Max(group))

    return tree.mapped(largest, x)


@untraced
def pvary(x: Tree, axis: AxisName, *, mesh: Mesh | None = None) -> Tree:
    """A value that is equal on all ranks, as one that may differ (``jax.lax.pvary``, ``pcast(to="varying")``).

    Invariant -> varying; its adjoint is ``psum``. Replicated parameters pass through it where data-parallel code
    begins to use them: their gradient is the sum over ranks. Inside of ``fs.shard_map`` it does nothing, since all
    values are varying there.

    Args:
        x: a tensor of any shape, or a pytree of tensors and numbers.
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> def gradient():  # of a weight that both ranks hold, each with an input of its own
    ...     w = torch.ones((), requires_grad=True)
    ...     (fs.collectives.pvary(w, "data", mesh=mesh) * (mesh.rank + 1)).backward()
    ...     return w.grad
    >>> mesh.run(gradient)
    [tensor(3.), tensor(3.)]
    """
    group = resolve(axis, mesh)
    if group.implicit:
        return x
    return tree.mapped(lambda leaf: linear.apply(leaf, linear.Vary(group)) if isinstance(leaf, Tensor) else leaf, x)


@untraced
def all_gather(
    x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False, to: str = "varying", mesh: Mesh | None = None
) -> Tree:
    """The tensors of all ranks along an axis (``jax.lax.all_gather``). Varying -> varying; its adjoint is
    ``psum_scatter``.

    Args:
        x: a tensor, or a pytree of tensors.
        axis: the name of an axis, or a tuple of names.
        dim: where the ranks come to lie. With ``tiled=False`` it is a new dim of the result, whose size is that of the
            axis; with ``tiled=True`` the tensors are concatenated along this dim.
        tiled: concatenate instead of stacking.
        to: ``"varying"``, or ``"invariant"`` for a result that counts as one value. Its adjoint is then this rank's
            slice, without communication.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: ``x`` has no such dim.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.all_gather(torch.tensor([mesh.rank]), "data", tiled=True, mesh=mesh))
    [tensor([0, 1]), tensor([0, 1])]
    """
    group = resolve(axis, mesh)
    if to not in ("varying", "invariant"):
        raise CollectiveError(f"all_gather: to={to!r} is neither 'varying' nor 'invariant'")
    invariant = to == "invariant" and not group.implicit
    return _map("all_gather", x, lambda leaf: make_linear.gather(leaf, group, dim, tiled, invariant))


@untraced
def psum_scatter(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False, mesh: Mesh | None = None) -> Tree:
    """This rank's slice of the sum over an axis (``jax.lax.psum_scatter``). Varying -> varying; its adjoint is
    ``all_gather``.

    Args:
        x: a tensor, or a pytree of tensors. Bools must be cast first.
        axis: the name of an axis, or a tuple of names.
        dim: which dim is divided over the ranks. With ``tiled=False`` its size must be that of the axis, and it goes.
        tiled: keep the dim; its size must be a multiple of the axis.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: the axis does not divide the dim.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.psum_scatter(torch.tensor([1, 10]), "data", mesh=mesh))
    [tensor(2), tensor(20)]
    """
    group = resolve(axis, mesh)

    def scatter(leaf: Tensor) -> Tensor:
        op = make_linear.scatter_op(leaf, group, dim, tiled, "psum_scatter")
        out = applied(leaf, op)
        return out if tiled else out.squeeze(op.dim)

    return _map("psum_scatter", x, scatter)


@untraced
def all_to_all(
    x: Tree, axis: AxisName, split_dim: int, concat_dim: int, *, tiled: bool = False, mesh: Mesh | None = None
) -> Tree:
    """Cut a dim over the ranks and join what arrives along another (``jax.lax.all_to_all``). Varying -> varying; its
    adjoint is ``all_to_all`` with the dims swapped.

    Args:
        x: a tensor, or a pytree of tensors.
        axis: the name of an axis, or a tuple of names.
        split_dim: slice ``i`` along it goes to rank ``i``. With ``tiled=False`` its size must be that of the axis, and
            it goes.
        concat_dim: where the slices come to lie, by rank. With ``tiled=False`` it is a new dim of the result; with
            ``tiled=True`` they are concatenated along this dim.
        tiled: keep both dims.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: the axis does not divide the dim.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> x = lambda: torch.tensor([0, 1]) + 10 * mesh.rank
    >>> mesh.run(lambda: fs.collectives.all_to_all(x(), "data", 0, 0, tiled=True, mesh=mesh))
    [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    group = resolve(axis, mesh)

    def exchange(leaf: Tensor) -> Tensor:
        op = make_linear.exchange_op(leaf, group, split_dim, concat_dim, tiled, "all_to_all")
        return make_linear.exchange(leaf, op, tiled)

    return _map("all_to_all", x, exchange)


@untraced
def ragged_all_to_all(
    x: Tree, axis: AxisName, send: Sequence[int], receive: Sequence[int], *, mesh: Mesh | None = None
) -> Tree:
    """Rows to ranks in unequal numbers (the uses that ``jax.lax.ragged_all_to_all`` has, with sizes alone).
    Varying -> varying; its adjoint sends back.

    Args:
        x: a tensor of shape (..., rows, width), or a pytree of such, all with ``sum(send)`` rows.
        axis: the name of an axis, or a tuple of names.
        send: for each rank along the axis, how many rows go to it: the first rows go to rank 0, and so on.
        receive: for each rank, how many rows come from it: what it has in its ``send`` for this rank. Exchange the
            numbers first, by ``all_to_all``: they are not checked here.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        A tensor of shape (..., sum(receive), width): the rows from rank 0 first.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: there are not as many numbers as ranks, or not as many rows as they say.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> def one_row_to_the_first():  # and two to the second
    ...     rows = torch.arange(3).view(3, 1) + 10 * mesh.rank
    ...     return fs.collectives.ragged_all_to_all(rows, "data", [1, 2], [mesh.rank + 1] * 2, mesh=mesh).flatten()
    >>> mesh.run(one_row_to_the_first)
    [tensor([ 0, 10]), tensor([ 1,  2, 11, 12])]
    """
    group = resolve(axis, mesh)
    return _map("ragged_all_to_all", x, lambda leaf: make_linear.ragged(leaf, group, send, receive))


@untraced
def ppermute(x: Tree, axis: AxisName, perm: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> Tree:
    """Send to other ranks (``jax.lax.ppermute``). Varying -> varying; its adjoint sends back.

    Args:
        x: a tensor, or a pytree of tensors.
        axis: the name of an axis, or a tuple of names.
        perm: ``(source, target)`` pairs of positions along the axis, no source and no target twice. Ranks that are no
            target get zeros.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.
        CollectiveError: ``perm`` names a position twice, or one that is not there.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.ppermute(torch.tensor(mesh.rank + 1), "data", [(0, 1)], mesh=mesh))
    [tensor(0), tensor(1)]
    """
    group = resolve(axis, mesh)
    op = make_linear.permute(group, perm)
    return _map("ppermute", x, lambda leaf: applied(leaf, op))


@untraced
def axis_index(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """This rank's position along an axis (``jax.lax.axis_index``), an int. Varying.

    Args:
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: (fs.collectives.axis_index("data", mesh=mesh), fs.collectives.axis_size("data", mesh=mesh)))
    [(0, 2), (1, 2)]
    """
    return resolve(axis, mesh).index


@untraced
def axis_size(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """The number of ranks along an axis (``jax.lax.axis_size``), an int. Invariant.

    Args:
        axis: the name of an axis, or a tuple of names.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis.

    >>> fs.collectives.axis_size(("replica", "data"), mesh=fs.abstract_mesh((2, 4), ("replica", "data")))
    8
    """
    return resolve(axis, mesh).size


def _sum(leaf: Any, group: Ranks, what: str) -> Any:
    if not isinstance(leaf, Tensor):
        return make_linear.number(leaf, what) * group.size
    make_linear.check_addable(leaf, what)
    total = linear.LinearSum(group)
    return applied(leaf, total, linear.Vary(group)) if group.implicit else applied(leaf, total)


def _map(what: str, x: Tree, fn: Callable[[Tensor], Tensor]) -> Tree:
    return tree.mapped(lambda leaf: fn(make_linear.tensor(leaf, what)), x)
