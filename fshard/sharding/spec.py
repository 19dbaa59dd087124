"""``P``: where one leaf lives, and tactics, which choose a ``P`` by a leaf's shape."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fshard.errors import PlanError
from fshard.sharding.mesh import Axes

Entry = str | tuple[str, ...] | None
Shape = tuple[int, ...]


def axes_of(entry: Entry) -> Axes:
    """The axes that one entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True, init=False, repr=False)
class P:
    """The mesh axes that cut each dim of a leaf (``jax.sharding.PartitionSpec``, and ``flat``).

    Args:
        *dims: for each tensor dim in order the axis, or the tuple of axes, that divides it, or None. Dims left out are
            whole. ``P()`` is replicated.
        flat: the axis or axes that flat-shard the rest of the leaf: the leaf becomes a range of its group's flat
            buffer, which is cut into equal chunks. It divides leaves of any size.

    >>> fs.P("tp", None, flat="data")
    P('tp', None, flat='data')
    """

    dims: tuple[Entry, ...]
    flat: Entry

    def __init__(self, *dims: Entry, flat: Entry = None) -> None:
        object.__setattr__(self, "dims", tuple(_entry(d) for d in dims))
        object.__setattr__(self, "flat", _entry(flat))

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.dims]
        if self.flat is not None:
            parts.append(f"flat={self.flat!r}")
        return f"P({', '.join(parts)})"

    @property
    def axes(self) -> Axes:
        """Every axis that the spec names, in order, with repetitions."""
        return tuple(axis for entry in (*self.dims, self.flat) for axis in axes_of(entry))

    def without(self, axes: Axes) -> "P":
        """The spec after a gather over these axes."""

        def keep(entry: Entry) -> Entry:
            return tuple(a for a in axes_of(entry) if a not in axes)

        return P(*(keep(entry) for entry in self.dims), flat=keep(self.flat))


def _entry(entry: object) -> Entry:
    """The canonical entry: ``("a",)`` becomes ``"a"``, and ``()`` None."""
    axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple | list) else ()
    if (entry is not None and axes == () and entry not in ((), [])) or not all(isinstance(a, str) for a in axes):
        raise PlanError(f"{entry!r} in a spec: an entry is the name of a mesh axis, a tuple of names, or None")
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None


Tactic = Callable[[Shape], P]
"""A function from a leaf's shape to its spec."""


@dataclass(frozen=True)
class fsdp:  # noqa: N801 - reads as the function it is in a rule
    """The tactic of fully sharded data parallelism: flat-shard each leaf over an axis (ZeRO-3, FSDP).

    Args:
        axis: the axis, or a tuple of axes.
        min_size: leaves of fewer elements are replicated instead.

    >>> fs.fsdp("data", min_size=100)((8, 8)), fs.fsdp("data")((8, 8))
    (P(), P(flat='data'))
    """

    axis: Entry
    min_size: int = 0

    def __post_init__(self) -> None:
        if not axes_of(_entry(self.axis)):
            raise PlanError(f"fs.fsdp(axis={self.axis!r}) names no axis: give one, or write fs.P() for replicated")
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise PlanError(f"fs.fsdp(min_size={self.min_size!r}): give a number of elements, an int >= 0")

    def __call__(self, shape: Shape) -> P:
        """The spec for a leaf of this shape."""
        return P(flat=self.axis) if math.prod(shape) >= self.min_size else P()
