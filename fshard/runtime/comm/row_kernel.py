"""The sum of rows in their order, as one kernel of Triton, which comes with PyTorch's builds for CUDA.

Imported where it is used: other builds have no Triton.
"""

from typing import Any

from torch import Tensor

from fshard.runtime.comm.triton_language import FUSION, constexpr, tl, triton

BLOCK = 1024
"""Elements that one program of the kernel adds up."""


def _sum_rows(out, rows, length, count: constexpr, add: constexpr, wide: constexpr, block: constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < length
    row = rows + at
    if add:
        total = tl.load(out + at, mask=there)
    else:
        total = tl.load(row, mask=there).to(wide)
        row += length
    for _ in range(0 if add else 1, count):
        total += tl.load(row, mask=there).to(wide)
        row += length
    tl.store(out + at, total, mask=there)


KERNEL: Any = None if triton is None else triton.jit(_sum_rows)


def sum_rows(out: Tensor, rows: Tensor, add: bool) -> None:
    """``out`` = the sum of the rows in their order, plus its own value if ``add``. ``out`` is float32."""
    KERNEL[(triton.cdiv(out.numel(), BLOCK),)](out, rows, out.numel(), len(rows), add, tl.float32, BLOCK, **FUSION)
