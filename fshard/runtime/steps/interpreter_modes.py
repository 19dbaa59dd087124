"""Modes of the interpreter that change what a program computes, and so must be equal on all ranks."""

import functools
from dataclasses import replace

import torch

from fshard.runtime.comm.facts import Facts, digest
from fshard.torch_internals import any_autocast, cudnn_benchmark, cudnn_deterministic

Modes = tuple[object, ...]

NAMES = (
    "autocast on the CPU",
    "autocast on CUDA",
    "torch.get_default_dtype()",
    "torch.is_grad_enabled()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.get_float32_matmul_precision()",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark",
)
"""What ``modes`` returns, in this order."""


NONE: Modes = (None, None)
"""The dtypes of autocast where there is none."""


def modes() -> Modes:
    """The modes of this thread and process."""
    return (
        *(_autocast() if any_autocast() else NONE),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cudnn_deterministic(),
        cudnn_benchmark(),
    )


def _autocast() -> Modes:
    on = torch.is_autocast_enabled
    return tuple([torch.get_autocast_dtype(device) if on(device) else None for device in ("cpu", "cuda")])


@functools.lru_cache(64)
def number_of(found: Modes) -> int:
    """A number that is equal on two ranks if these modes are."""
    return digest(found)


def with_modes(facts: Facts, found: Modes) -> Facts:
    """Facts, with modes of the interpreter among them.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     with_modes(Facts(), modes()).items()[0]["autocast on the CPU"]
    'torch.bfloat16'
    """

    def items() -> list[dict[str, str]]:
        first, *rest = [dict(tier) for tier in facts.items()] or [{}]
        return [first | dict(zip(NAMES, map(str, found), strict=True)), *rest]

    return replace(facts, number=facts.number ^ number_of(found), items=items)
