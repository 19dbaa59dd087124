"""The mesh that an axis name refers to.

``fs.shard_map`` and ``use_mesh`` bind the axes of a mesh for the calls inside of them, as transforms of JAX do. A
collective looks names up when it is called: its backward uses the same mesh. The errors of collectives are here, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fshard.arguments import described, expect, kind
from fshard.collectives.ranks import Ranks
from fshard.errors import AxisError, TransformError, unknown_axis
from fshard.runtime.comm.communicator import SingleRankTransport
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Axes, Mesh

AxisName = str | tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """A mesh whose axes are bound.

    Every value inside is varying over the axes ``implicit``: a collective's result that is invariant over them becomes
    varying at once. (JAX inserts the same ``pvary`` where an invariant value meets a varying one, which its tracer
    sees and ordinary PyTorch code does not show.) ``ties`` are those of a ``shard_map`` under way, and
    ``running`` is the step function under way. ``single`` is whether
    values are those of single samples, which collectives over the axes ``implicit`` would mix.
    """

    mesh: Mesh
    implicit: Axes
    ties: Any = None
    running: Any = None
    single: bool = False


# The one context variable of the package: the calls around, in this thread, bind a mesh.
SCOPE: ContextVar[Scope | None] = ContextVar("fshard_scope", default=None)


@contextmanager
def bind(mesh: Mesh, implicit: Axes, ties: Any = None, running: Any = None, single: bool = False) -> Iterator[None]:
    """Bind the axes of a mesh; every value inside is varying over the ``implicit`` ones."""
    token = SCOPE.set(Scope(mesh, implicit, ties, running, single))
    try:
        yield
    finally:
        SCOPE.reset(token)


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Bind the axes of a mesh, so that collectives inside need no ``mesh=`` (``jax.set_mesh``).

    Your code keeps the types of the table of ``fshard.collectives``: a ``psum`` is invariant, and must pass through
    ``pvary`` before it is combined with varying values, or gradients are wrong. ``fs.shard_map`` does that for you. An
    exception that leaves the block on one rank ends the waits of the others at once (``CommError``).

    Args:
        mesh: the mesh, real, virtual or abstract.

    >>> with fs.collectives.use_mesh(fs.make_mesh((1,), ("data",))):
    ...     fs.collectives.axis_size("data")
    1
    """
    expect("use_mesh(mesh)", [("mesh", mesh, Mesh, "what fs.make_mesh returned")])
    around = SCOPE.get()
    with cutting(mesh), bind(mesh, (), running=None if around is None else around.running):
        yield mesh


@contextmanager
def cutting(mesh: Mesh) -> Iterator[None]:
    """Tell ranks that wait for this one in a collective at once that an exception left the block, and which.

    All ranks make new communicators for their next collective, so an exception on all ranks leaves the mesh usable.
    """
    transport = mesh.transport or SingleRankTransport()
    try:
        with transport.program():
            yield
    except BaseException as error:
        transport.abort(COLLECTIVES, f"{type(error).__name__}: {error}")
        raise


def in_scope(what: object, mesh: Mesh | None = None) -> tuple[Mesh, Axes]:
    """The given mesh, or else the one in scope; and the axes over which all its values are varying.

    Raises:
        AxisError: no mesh is given or in scope, or the given one is not that of the enclosing function.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise AxisError(f"mesh={mesh!r} is {kind(mesh)}, not a mesh: give what fs.make_mesh returned")
    scope = SCOPE.get()
    if scope is None:
        if mesh is None:
            raise unbound_axis(what)
        return mesh, ()
    here = scope.mesh if mesh is None else mesh
    if scope.implicit and (here.sizes, here.axis_names) != (scope.mesh.sizes, scope.mesh.axis_names):
        raise AxisError(f"mesh={here} inside of a function over {scope.mesh}: collectives there use its axes")
    return here, scope.implicit


def bound_size(axis: str) -> int:
    """The number of ranks along an axis of the mesh in scope; 1 where no mesh is in scope, or it has no such axis."""
    scope = SCOPE.get()
    return 1 if scope is None else scope.mesh.shape.get(axis, 1)


def resolve(axis: AxisName, mesh: Mesh | None = None) -> Ranks:
    """The ranks along an axis, of this mesh or of the one in scope.

    Raises:
        AxisError: no mesh is in scope, or it has no such axis, or an axis is named twice.
        TransformError: ranks along it have samples of their own, which the function treats one by one.
    """
    if isinstance(axis, Mesh):
        raise AxisError(f"axis is {described(axis)}: give the name of a mesh axis; a mesh goes by name, mesh=")
    mesh, implicit = in_scope(axis, mesh)
    if not isinstance(axis, str | tuple):
        raise unknown_axis(axis, mesh.axis_names)
    axes = axis if isinstance(axis, tuple) else (axis,)
    for name in axes:
        if name not in mesh.axis_names:
            raise unknown_axis(name, mesh.axis_names)
    if not axes or len(set(axes)) < len(axes):
        raise AxisError(f"axis={axis!r}: name at least one axis, and none twice; the mesh has {mesh.axis_names}")
    scope = SCOPE.get()
    if scope is not None and scope.single and not set(axes).isdisjoint(implicit):
        raise mixed_samples(axes)
    return group_of(axes, mesh, implicit)


def group_of(axes: Axes, mesh: Mesh, implicit: Axes) -> Ranks:
    """The ranks along axes that are all implicit, or all not.

    Raises:
        AxisError: some are implicit and others are not.
    """
    inside = [axis in implicit for axis in axes]
    if any(inside) and not all(inside):
        raise AxisError(
            f"axis={axes!r}: here all values are varying over {implicit}, but types are kept over the other axes; make "
            f"one call for the axes of each kind"
        )
    return Ranks(mesh, axes, all(inside))


def unbound_axis(axis: object) -> AxisError:
    """An axis name was used where no mesh is in scope."""
    return AxisError(
        f"no mesh is in scope that defines axis {axis!r}: call this inside of a function that fs.shard_map "
        f"or a train step runs, or under fs.collectives.use_mesh(mesh), or pass mesh="
    )


def mixed_samples(axes: tuple[str, ...]) -> TransformError:
    """A loss of single samples asked for a collective between ranks with other samples."""
    return TransformError(
        f"a collective over axis {' and '.join(map(repr, axes))} in a loss of single samples: it would mix one sample "
        f"of each rank along the axis. Compute what samples share before, and give it with the batch, or take "
        f"fs.value_and_grad, whose loss sees all of them"
    )


def wrapped(what: str) -> TransformError:
    """A tensor wrapped by a transform was given to a function of plain data."""
    return TransformError(
        f"{what} takes plain data, and was given a tensor that a transform of torch.func wraps: call the "
        f"differentiable form, without _start, or call it outside of the transform"
    )


def untraceable(what: str) -> TransformError:
    """A collective was traced into a graph, where its result would become a constant."""
    return TransformError(
        f"{what} cannot be traced into a graph, where its result would become a constant (torch.func.linearize, "
        f"make_fx and torch.jit.trace do this): use torch.func.jvp or vjp instead of linearize"
    )


def no_derivative() -> TransformError:
    """A derivative of ``pmax`` was requested."""
    return TransformError(
        "pmax has no derivative: use pmax(x.detach(), axis) where it is a constant, as in a softmax, or take the "
        "maximum of all_gather(x, axis), which has one"
    )
