"""Global tensors and their slices under specs."""

from collections.abc import Sequence

from torch import Tensor

from fshard.arguments import described
from fshard.collectives.linear import Collect, Gather, LinearCut
from fshard.collectives.make_linear import tensor, untraced
from fshard.collectives.scope import group_of, in_scope
from fshard.collectives.ties import applied
from fshard.errors import CollectiveError, unknown_axis
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.spec import P, axes_of


@untraced
def cut(x: Tensor, spec: P, *, mesh: Mesh | None = None) -> Tensor:
    """This rank's slice of a global tensor that all ranks hold. Invariant -> varying over the spec's axes; its adjoint
    is ``assemble``.

    Args:
        x: the global tensor.
        spec: which axes divide its dims, without ``flat``.
        mesh: if not the one in scope.

    Raises:
        AxisError: the mesh has no such axis, or none is in scope.
        CollectiveError: the axes do not divide the shape.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.cut(torch.arange(4), fs.P("data"), mesh=mesh))
    [tensor([0, 1]), tensor([2, 3])]
    """
    mesh, implicit = in_scope(spec, mesh)
    check_spec(tensor(x, "cut"), spec, mesh, "cut", True)
    for dim, axes in _divided(spec):
        group = group_of(axes, mesh, implicit)
        if group.implicit:
            x = x.chunk(group.size, dim)[group.index]
        else:
            x = applied(x, LinearCut(group, dim - x.dim()))
    return x


@untraced
def assemble(x: Tensor, spec: P, *, mesh: Mesh | None = None) -> Tensor:
    """The global tensor of these slices, on all ranks. Varying -> invariant over the spec's axes; its adjoint is
    ``cut``.

    Args:
        x: this rank's slice.
        spec: which axes divide the dims of the global tensor.
        mesh: if not the one in scope.

    Raises:
        AxisError: the mesh has no such axis, or none is in scope.
        CollectiveError: the spec names more dims than there are.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: fs.collectives.assemble(torch.tensor([mesh.rank]), fs.P("data"), mesh=mesh))
    [tensor([0, 1]), tensor([0, 1])]
    """
    mesh, implicit = in_scope(spec, mesh)
    check_spec(tensor(x, "assemble"), spec, mesh, "assemble", False)
    for dim, axes in _divided(spec):
        group = group_of(axes, mesh, implicit)
        kind = Gather if group.implicit else Collect
        x = applied(x, kind(group, dim - x.dim()))
    return x


def other_axes(spec: P, mesh: Mesh) -> Axes:
    """The axes of a mesh that a spec does not name."""
    return tuple(axis for axis in mesh.axis_names if axis not in spec.axes)


def check_spec(x: Tensor, spec: P, mesh: Mesh, label: str, whole: bool) -> None:
    """Refuse a spec that a tensor cannot have.

    Args:
        x: the tensor, a global one if ``whole``.
        label: the tensor's name in errors.
        whole: check that the axes divide the dims.
    """
    if not isinstance(spec, P):
        raise CollectiveError(f"{label}: the spec is {described(spec)}: give one, such as fs.P({mesh.axis_names[0]!r})")
    for axis in spec.axes:
        if axis not in mesh.axis_names:
            raise unknown_axis(axis, mesh.axis_names)
    if spec.flat is not None or len(set(spec.axes)) < len(spec.axes):
        why = "flat-shards, which only leaves of a plan can be" if spec.flat else "names an axis twice"
        raise CollectiveError(f"{label}: {spec} {why}; name one or more axes for each dim that is divided")
    if len(spec.dims) > x.dim():
        raise CollectiveError(f"{label} has shape {list(x.shape)}, but {spec} names {len(spec.dims)} dims")
    for dim, axes in _divided(spec) if whole else ():
        if x.shape[dim] % mesh.axis_size(axes):
            raise CollectiveError(
                f"{label} has shape {list(x.shape)}: dim {dim} is not a multiple of {mesh.axis_size(axes)}, the size "
                f"of {'+'.join(axes)!r} in {spec}; pad it, or divide another dim"
            )


def slice_of(x: Tensor, spec: P, mesh: Mesh, rank: int) -> Tensor:
    """A rank's slice of a global tensor, as a view."""
    for dim, axes in _divided(spec):
        x = x.chunk(mesh.axis_size(axes), dim)[mesh.index(axes, rank)]
    return x


def joined(slices: Sequence[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """The global tensor of the slices of all ranks, in rank order: the inverse of ``slice_of``."""
    shape = list(slices[0].shape)
    for dim, axes in _divided(spec):
        shape[dim] *= mesh.axis_size(axes)
    out = slices[0].new_empty(shape)
    for rank in reversed(range(mesh.size)):  # of equal slices the first rank's is written last
        slice_of(out, spec, mesh, rank).copy_(slices[rank])
    return out


def _divided(spec: P) -> list[tuple[int, Axes]]:
    return [(dim, axes_of(entry)) for dim, entry in enumerate(spec.dims) if entry is not None]
