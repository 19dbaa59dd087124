"""The fake mode of traces. It notes the mesh axes of the collectives that a program calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from fshard.runtime.engine.fake_fallback import KernelFakeMode
from fshard.sharding.mesh import Axes, Mesh


class ProgramMode(KernelFakeMode):  # type: ignore[no-untyped-call]
    """Makes tensors without data.

    A collective of such tensors moves nothing, and tells the mode of its tensor which communicator it would need. So a
    trace on any mesh, also on an abstract one, knows the communicators of the program that it has run.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._mesh: Mesh | None = None
        self._axes: dict[Axes, None] = {}

    @contextmanager
    def noting(self, mesh: Mesh, axes: dict[Axes, None]) -> Iterator[None]:
        """Inside, write down the axes of the collectives over this mesh."""
        before, (self._mesh, self._axes) = (self._mesh, self._axes), (mesh, axes)
        try:
            yield
        finally:
            self._mesh, self._axes = before

    def foresee(self, mesh: Mesh, axes: Axes) -> None:
        """Ranks of a mesh would communicate over these axes."""
        own = self._mesh
        if own is None or (own.sizes, own.axis_names) != (mesh.sizes, mesh.axis_names):
            return
        if own.transport is mesh.transport and mesh.axis_size(axes) > 1:
            self._axes[tuple(axis for axis in mesh.axis_names if axis in axes)] = None
