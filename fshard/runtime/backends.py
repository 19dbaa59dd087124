"""The backends that ``compile=`` names."""

from typing import TYPE_CHECKING

from fshard.errors import PlanError

if TYPE_CHECKING:
    from fshard.runtime.graphs.cache import Cache

BACKENDS = ("fx", "inductor")


def make_cache(backend: str | None) -> "Cache | None":
    """The graphs of a backend, of which there are none yet; None without a backend.

    Raises:
        PlanError: there is no such backend, or it does not work here.
    """
    if backend is None:
        return None
    if backend not in BACKENDS:
        raise PlanError(f"compile={backend!r} must be None, 'fx' or 'inductor'")
    # Tracing needs modules of torch that take long to import.
    from fshard.runtime.graphs.cache import Cache
    from fshard.runtime.graphs.emit import emit

    return Cache(emit, backend)
