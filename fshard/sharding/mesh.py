"""A mesh: the ranks of a job on named axes."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from fshard import markup
from fshard.arguments import counted, expect
from fshard.errors import PlanError, unknown_axis

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job on named axes, in row-major order, as seen from one of them.

    A mesh is a value. Made by ``fs.make_mesh`` it also carries the transport that joins its ranks; made by
    ``fs.abstract_mesh`` it carries none, and is good for planning without processes.

    >>> mesh = fs.abstract_mesh((2, 4), ("replica", "data"), rank=6)
    >>> mesh.coords(), mesh.ranks(("data",)), mesh.ranks(("replica",))
    ((1, 2), (4, 5, 6, 7), (2, 6))
    """

    sizes: tuple[int, ...]
    axis_names: Axes
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    transport: Any = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def device_here(self) -> bool:
        """Tell whether this process has such a device; one that plans for others need not."""
        return self.device.type in ("cpu", "meta") or torch.get_device_module(self.device).is_available()

    def check_device(self) -> None:
        """Refuse to make tensors on a device that is not there.

        Raises:
            PlanError: with the device.
        """
        if not self.device_here:
            raise PlanError(
                f"the mesh {self.shape} is for {self.device}, and this process has no such device: it can plan, trace "
                f"and simulate for it. To hold tensors here make the plan for fs.abstract_mesh(device='cpu')"
            )

    @property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis by its name."""
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def here(self) -> "Mesh":
        """The mesh as the rank of the caller holds it: the mesh itself, but on a virtual mesh."""
        return self

    @property
    def whole(self) -> "Mesh":
        """The mesh of all ranks: the mesh itself, unless it is the part of one replica (``sharding/part_mesh.py``)."""
        return self

    @property
    def together(self) -> "Mesh":
        """The mesh of the ranks that make each step together: the mesh itself, unless it is a stage of a pipeline."""
        return self

    @property
    def members(self) -> Sequence[int]:
        """The number of each rank on the mesh of all ranks."""
        return range(self.size)

    @property
    def everywhere(self) -> bool:
        """Tell whether the caller stands for all ranks: on a virtual mesh, outside of ``run``."""
        return False

    def axis_size(self, axes: str | Axes) -> int:
        """The number of ranks along an axis, or along several together.

        Raises:
            AxisError: the mesh has no such axis. All methods that take axes raise it.
        """
        shape = self.shape
        return math.prod(shape[axis] for axis in self._named(axes))

    def coords(self, rank: int | None = None) -> tuple[int, ...]:
        """A rank's position along each axis; this rank's by default."""
        rest = self.rank if rank is None else rank
        out = []
        for size in reversed(self.sizes):
            rest, here = divmod(rest, size)
            out.append(here)
        return tuple(reversed(out))

    def index(self, axes: str | Axes, rank: int | None = None) -> int:
        """A rank's position along these axes, the last axis running fastest."""
        axes = self._named(axes)
        at = dict(zip(self.axis_names, self.coords(rank), strict=True))
        shape, index = self.shape, 0
        for axis in axes:
            index = index * shape[axis] + at[axis]
        return index

    def ranks(self, axes: str | Axes, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from a rank only along these axes, in the order of their positions."""
        axes = self._named(axes)
        base = self.rank if rank is None else rank
        strides = {name: math.prod(self.sizes[i + 1 :]) for i, name in enumerate(self.axis_names)}
        at = dict(zip(self.axis_names, self.coords(base), strict=True))
        corner = base - sum(at[axis] * strides[axis] for axis in axes)
        steps = itertools.product(*([i * strides[axis] for i in range(self.shape[axis])] for axis in axes))
        return tuple(corner + sum(step) for step in steps)

    def partition(self, axes: str | Axes) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that communicate over these axes. Each rank is in one of them."""
        return tuple(dict.fromkeys(self.ranks(axes, r) for r in range(self.size)))

    def _repr_html_(self) -> str:
        names, sizes = self.axis_names[-2:], self.sizes[-2:]
        if len(names) == 1:
            names, sizes = ("", *names), (1, *sizes)
        tables, block = [], sizes[0] * sizes[1]
        for first in range(0, self.size, block):
            outer = zip(self.axis_names[:-2], self.coords(first), strict=False)
            head = [" ".join(f"{name}={at}" for name, at in outer), *(f"{names[1]}={at}" for at in range(sizes[1]))]
            rows = [
                [f"{names[0]}={row}" if names[0] else "", *(str(first + row * sizes[1] + at) for at in range(sizes[1]))]
                for row in range(sizes[0])
            ]
            tables.append(markup.table(head, rows))
        axes = " x ".join(f"{name}={size}" for name, size in self.shape.items())
        kind = "a virtual mesh" if self.everywhere else "an abstract mesh" if self.transport is None else "a mesh"
        seen = "" if self.everywhere else f", seen from rank {self.rank}"
        return markup.shown(f"{kind} of {counted(self.size, 'rank')}: {axes}, {self.device.type}{seen}", *tables)

    def _named(self, axes: str | Axes) -> Axes:
        """Axes of this mesh as a tuple."""
        named = axes if isinstance(axes, tuple) else (axes,)
        for axis in named:
            if axis not in self.axis_names:
                raise unknown_axis(axis, self.axis_names)
        return named

    def __copy__(self) -> Self:
        """The mesh itself: it is a value."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The mesh itself, whose communicators cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled mesh is abstract: another process can plan on it, and gets an error where it communicates."""
        return Mesh, (self.sizes, self.axis_names, self.rank, self.device)

    def close(self) -> None:
        """Leave the process group, if ``make_mesh`` joined one. Collective; an abstract mesh does nothing."""
        if self.transport is not None:
            self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.transport is not None:  # ranks that wait for this one get its error
            self.transport.close("" if error is None else f"{type(error).__name__}: {error}")


def abstract_mesh(sizes: Sequence[int], axis_names: Sequence[str], *, rank: int = 0, device: str = "cpu") -> Mesh:
    """A mesh without processes, for planning (``jax.sharding.AbstractMesh``).

    Args:
        sizes: ranks along each axis, all positive.
        axis_names: one name an axis.
        rank: the rank that looks at the mesh.
        device: the device of that rank's tensors.

    Raises:
        PlanError: names and sizes do not match, a name occurs twice, or the rank is outside of the mesh.

    >>> mesh = fs.abstract_mesh((2, 4), ("replica", "data"), rank=5)
    >>> mesh.size, mesh.coords()
    (8, (1, 1))
    """
    resolved = resolve_sizes(sizes, axis_names, None)
    where = ("device", device, (str, torch.device), 'a device, such as "cuda"')
    expect("abstract_mesh(sizes, axis_names)", [("rank", rank, int, "the number of a rank"), where])
    world = math.prod(resolved)
    if not 0 <= rank < world:
        raise PlanError(
            f"rank={rank} is outside of a mesh of {counted(world, 'rank')}: give a rank from 0 to {world - 1}"
        )
    return Mesh(resolved, tuple(axis_names), rank, torch.device(device))


def resolve_sizes(sizes: Sequence[int], names: Sequence[str], world: int | None) -> tuple[int, ...]:
    """The sizes with their one ``-1`` replaced so that they multiply to ``world`` (any product if it is None)."""
    sizes = _checked(sizes, names)
    known = math.prod(n for n in sizes if n != -1)
    if -1 not in sizes:
        if world is not None and known != world:
            raise PlanError(
                f"mesh sizes {sizes} multiply to {known}, but the world has {counted(world, 'rank')}: start "
                f"{counted(known, 'rank')} (torchrun --nproc-per-node {known}), or write -1 for one axis"
            )
        return sizes
    if world is None or sizes.count(-1) > 1:
        why = "there is no world to divide" if world is None else "only one axis can be left open"
        raise PlanError(
            f"mesh sizes {sizes} leave {counted(sizes.count(-1), 'size')} open by -1, but {why}: give the sizes"
        )
    if world % known:
        raise PlanError(
            f"mesh sizes {sizes} over {counted(world, 'rank')}: {world} is not a multiple of {known}, so no size "
            f"fits the -1 of axis {names[sizes.index(-1)]!r}; start a multiple of {known} ranks or change the other "
            f"sizes"
        )
    return tuple(world // known if n == -1 else n for n in sizes)


def _checked(sizes: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    shape = "one size an axis, such as (2, 4) or (-1,)"
    axes = 'one name an axis, such as ("replica", "data") or ("data",)'
    expect("a mesh", [("sizes", sizes, (tuple, list), shape), ("axis_names", names, (tuple, list), axes)])
    sizes, names = tuple(sizes), tuple(names)
    named = bool(names) and len(set(names)) == len(names) and all(isinstance(name, str) and name for name in names)
    if len(sizes) != len(names) or not named:
        raise PlanError(f"a mesh needs one distinct name an axis: got sizes {sizes} and names {names}")
    if any(not isinstance(n, int) or isinstance(n, bool) or (n < 1 and n != -1) for n in sizes):
        raise PlanError(f"mesh sizes {sizes}: each is a positive int, or -1 once for what is left of the world")
    return sizes
