"""Kernels of Triton, used where they can be compiled and have the bits of PyTorch's operators."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

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
