"""Finds random numbers that are drawn twice: the scope behind ``fs.random.checked``."""

import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard.errors import KeyReuseError
from fshard.torch_internals import FakeTensor, functorch, graph_task

PACKAGES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Reuse(TorchFunctionMode):
    """Records the draws of functions ``draw(key, part, ...)``; raises where two from one key share positions."""

    def __init__(self, *draws: Callable[..., Tensor]) -> None:
        super().__init__()
        self.draws = draws
        self.seen: dict[tuple[int, ...], list[tuple[Any, str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.draws and graph_task() == -1:
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _record(self, key: Tensor, part: Any) -> None:
        starts = [int(x) if isinstance(x, int) or _readable(x) else None for x in part.start]
        rows = list(_rows(key))
        if None in starts or not rows or not math.prod(part.shape):
            return
        here, use = _place(), (part.shape, tuple(starts), part.whole)
        for row in rows:
            for other, place in self.seen.get(row, []):
                if _overlap(use, other):
                    raise KeyReuseError(
                        f"the key {list(row)} is used twice: for a draw of shape {list(other[0])} at {place}, and for "
                        f"one of shape {list(part.shape)} at {here}. They share random numbers. Draw from "
                        f"different keys: first, second = fs.random.split(key), or fs.random.fold_in(key, number)"
                    )
            self.seen.setdefault(row, []).append((use, here))


def _overlap(a: Any, b: Any) -> bool:
    """Tell whether two boxes ``(shape, start, whole)`` share positions."""
    if a[2][1:] == b[2][1:]:
        sides = zip(a[0], a[1], b[0], b[1], strict=True)
        return all(first < other + length and other < first + size for size, first, length, other in sides)
    (low, high), (start, stop) = _range(a), _range(b)
    return low <= stop and start <= high


def _range(box: Any) -> tuple[int, int]:
    """The first and the last position of a box."""
    low = high = 0
    for size, first, length in zip(*box, strict=True):
        low, high = low * length + first, high * length + first + size - 1
    return low, high


def _readable(value: Tensor) -> bool:
    wrapped = functorch.is_functorch_wrapped_tensor(value)
    return not wrapped and not isinstance(value, FakeTensor) and value.device.type != "meta"


def _rows(key: Tensor) -> Iterator[tuple[int, ...]]:
    """The keys that a tensor holds: one for each sample of the vmaps around it."""
    while functorch.is_functorch_wrapped_tensor(key):
        dim = functorch.maybe_get_bdim(key)
        key = functorch.get_unwrapped(key)
        key = key.movedim(dim, 0) if dim >= 0 else key
    if _readable(key):
        yield from map(tuple, key.reshape(-1, 2).tolist())


def _place() -> str:
    """The innermost line of the caller's own code."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(PACKAGES)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
