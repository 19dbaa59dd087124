"""Triton, which PyTorch's builds for CUDA bring; None in other builds. Imported by kernels alone: it takes time."""

from typing import Any

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

__all__ = ["FUSION", "constexpr", "tl", "triton"]

constexpr: Any = Any if tl is None else tl.constexpr
"""Triton reads annotations of kernels, and knows its own alone."""

FUSION = {"enable_fp_fusion": False}
"""An option of Triton: a product and a sum stay two roundings, whatever the default of its release is."""
