"""The backends that ``compile=`` names."""

import warnings
from typing import TYPE_CHECKING

from fshard.errors import PlanError
from fshard.runtime.comm.packing import Kernels, no_kernels

if TYPE_CHECKING:
    from fshard.runtime.graphs.cache import Cache

BACKENDS = ("fx", "inductor")


def check_backend(backend: str | None) -> None:
    """Refuse what no backend is.

    Raises:
        PlanError: there is no such backend, or it does not work here.
    """
    if backend is not None and backend not in BACKENDS:
        raise PlanError(f"compile={backend!r} must be None, 'fx' or 'inductor'")
    if backend == "inductor":
        _check_compiler()


def make_cache(backend: str | None) -> "Cache | None":
    """An empty cache of the graphs of a checked backend; None without a backend."""
    if backend is None:
        return None
    # Tracing needs modules of torch that take long to import.
    from fshard.runtime.graphs.cache import Cache
    from fshard.runtime.graphs.emit import emit

    if backend == "fx":
        return Cache(emit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own imports use what torch deprecates
        from fshard.runtime.graphs.inductor import compile_halves

    from fshard.runtime.graphs.packing_kernels import PackingKernels

    return Cache(compile_halves, PackingKernels())


def packing_kernels(cache: "Cache | None") -> Kernels:
    """Return what packs wire formats in steps of a backend."""
    return no_kernels if cache is None else cache.packing


def _check_compiler() -> None:
    """See that there is what Inductor needs on the CPU; on a GPU it needs triton, which says so itself."""
    from fshard.torch_internals import InvalidCxxCompiler, get_cpp_compiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError) as error:
        raise PlanError(
            "compile='inductor' needs a C++ compiler, and there is none: install g++ or clang++ (apt install g++), or "
            "name one in the environment variable CXX; compile='fx' needs none"
        ) from error
