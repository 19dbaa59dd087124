"""Capturing what a function issues on a device, and what no capture can hold."""

import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.comm.host_calls import Cut, HostCall
from fshard.torch_internals import TorchDispatchMode

T = TypeVar("T")
Replay = Callable[[], object]

ATEN = torch.ops.aten
WAITING = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


OUTSIDE = ("fshard.runtime.steps.passes", "fshard.runtime.steps.runner")
"""The modules that call the loss function, or its backward."""


class Capture(Protocol):
    """A device whose work can be captured."""

    def capture(self, run: Callable[[Cut], T]) -> tuple[Replay, T]:
        """Call a function, whose work on the device is captured and not done.

        Args:
            run: is given what cuts the capture in two segments, between which the host makes a call in each replay.

        Returns:
            A function that does this work, and what the function has returned: tensors whose values each replay makes.
        """


class CudaCapture:
    """Captures CUDA graphs, one a segment, whose memory is one pool. It was not run on a GPU.

    Memory that a segment frees goes to later ones: they are replayed in the order of their capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.stream: Any = None

    def capture(self, run: Callable[[Cut], T]) -> tuple[Replay, T]:
        """See ``Capture.capture``."""
        graphs, calls = list[Any](), list[Callable[[], object]]()

        def cut(call: HostCall) -> None:
            _end(graphs[-1])
            calls.extend((graphs[-1].replay, call.run))
            graphs.append(self._begun())

        with torch.cuda.device(self.device):
            if self.stream is None:
                self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool takes memory of its own
            with torch.cuda.stream(self.stream):
                graphs.append(self._begun())
                try:
                    result = run(cut)
                except BaseException:
                    with suppress(RuntimeError):  # of a capture that has failed already
                        _end(graphs[-1])
                    raise
                _end(graphs[-1])
        calls.append(graphs[-1].replay)
        return lambda: _call_all(calls), result

    def _begun(self) -> Any:
        """A graph that captures the current stream. Threads of NCCL may ask for events meanwhile."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        return graph


def _end(graph: Any) -> None:
    """End a segment, which may have no work, as between two waits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def capture_of(device: torch.device) -> Capture | None:
    """Return what captures the work of a device; None if nothing does."""
    return CudaCapture(device) if device.type == "cuda" else None


class HostWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds operators of which a capture would keep a value of the host, or for which the host waits.

    Attributes:
        found: the operators, and where the user's code calls each.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in tree.leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        host = [x for x in tensors if x.device.type != self.device]
        waits = bool(WAITING.intersection(func.tags)) or func is ATEN.lift_fresh.default
        if len(host) < len(tensors) and (waits or host) and not _shape_only(func):
            place = _place()
            if place or waits or any([x.ndim for x in host]):  # backwards take numbers that follow from shapes
                self.found[f"{func}{place}"] = None
        return out


def _shape_only(func: Any) -> bool:
    """Tell whether an operator reads nothing of its argument but what it is."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


def _place() -> str:
    """The line of the loss function that is under way; empty if there is none, as in a backward."""
    frame: Any = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")) not in OUTSIDE:
        if module.partition(".")[0] not in ("torch", "fshard"):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
