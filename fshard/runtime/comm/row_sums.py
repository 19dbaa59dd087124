"""Sums of rows in the order of ranks, so that equal rows give equal bits on every run and on every rank.

A kernel of Triton is used where it can be compiled and has the bits of PyTorch's operators.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def checked(kernel: K, does: str, device: torch.device, same: Callable[[], bool], instead: str) -> K | None:
    """A kernel, if ``same`` runs it and finds the bits of operators; else None, with a warning.

    Args:
        kernel: the kernel.
        does: what it does, as in "that sums rows".
        device: where it runs.
        same: tells whether its bits are those of operators.
        instead: what makes the same results without it.
    """
    problem = "it has other bits than PyTorch's operators"
    try:
        if same():
            return kernel
    except Exception as error:  # Triton needs a C compiler and the headers of Python
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"the kernel {does} cannot be used on {device}: {problem}. The results are the same, and {instead}",
        stacklevel=3,
    )
    return None


Kernel = Callable[[Tensor, Tensor, bool], None]

SHORT = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows that a kernel adds up in float32."""


PIECE = 1 << 14
"""Elements that are added at once where dtypes differ: the CPU makes a copy of them in the dtype of the sum."""


def sum_rows(out: Tensor, rows: Iterable[Tensor], add: bool) -> None:
    """``out`` = the sum of the rows in order, plus its own value if ``add``. ``out`` may be the first or second row.

    On a GPU the rows of a tensor are added by one kernel, which reads each once and has the bits of a sum one by one.
    """
    if isinstance(rows, Tensor) and len(rows) > 2 and out.dtype == torch.float32 and rows.dtype in SHORT:
        kernel = kernel_of(out.device)
        if kernel is not None and out.is_contiguous() and rows.is_contiguous():
            kernel(out, rows, add)
            return
    _sum_one_by_one(out, rows, add)


def _sum_one_by_one(out: Tensor, rows: Iterable[Tensor], add: bool) -> None:
    rest = iter(rows)
    if not add:
        first, second = next(rest), next(rest, None)
        if second is not None and first.dtype == out.dtype:
            torch.add(first, second, out=out)
        else:
            out.copy_(first)
            rest = chain([second] if second is not None else [], rest)
    for row in rest:
        if row.dtype == out.dtype or out.device.type != "cpu":
            out.add_(row)
            continue
        for part, other in zip(torch.split(out, PIECE), torch.split(row, PIECE), strict=True):
            part.add_(other)


@functools.cache
def kernel_of(device: torch.device) -> Kernel | None:
    """The kernel that adds rows up on a device; None where there is none. Its first call waits for the device."""
    if device.type != "cuda":
        return None
    from fshard.runtime.comm import row_kernel

    return None if row_kernel.KERNEL is None else right(row_kernel.sum_rows, device)


def right(kernel: Kernel, device: torch.device) -> Kernel | None:
    """A kernel, if it can be compiled here and has the bits of PyTorch's sums; else None, with a warning."""

    def same() -> bool:
        # Not drawn: the first collective may be inside of a unit that is computed again, where own generators are
        # refused. The power makes numbers of very different sizes, so that their order matters.
        rows = torch.arange(5 * 3001, device=device).view(5, 3001).float().mul(12.9898).sin().pow(9).bfloat16()
        for add in (False, True):
            ours, theirs = [torch.full((3001,), 0.1, dtype=torch.float32, device=device) for _ in range(2)]
            kernel(ours, rows, add)
            _sum_one_by_one(theirs, rows, add)
            if not torch.equal(ours, theirs):
                return False
        return True

    return checked(kernel, "that sums rows of other ranks", device, same, "one kernel a row makes them")
