"""Collectives that the host issues between the segments of a step, where a graph cannot hold them.

While a step is captured in segments, the start of a collective and its wait each end a segment. What the host does
there is noted, and done in each replay, on the memory that the capture has found.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fshard.runtime.comm.communicator import Communicator, Events, Handle, Sizes
from fshard.torch_internals import on_memory_of


@dataclass(frozen=True)
class HostCall:
    """A call that the host makes between two segments.

    Attributes:
        name: of it.
        tensors: the memory that it works on.
        run: makes it.
    """

    name: str
    tensors: tuple[Tensor, ...]
    run: Callable[[], object]


Cut = Callable[[HostCall], None]
"""Ends a segment, notes a call of the host, and begins the next segment."""

CUT = "_fshard_cut"
"""The attribute of a thread that cuts its capture."""


@contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """While this thread captures: collectives that it issues cut the capture."""
    thread = threading.current_thread()
    setattr(thread, CUT, cut)
    try:
        yield
    finally:
        delattr(thread, CUT)


def issued(comm: Communicator) -> Communicator:
    """The communicator, or in a capture in segments what notes its collectives."""
    cut = getattr(threading.current_thread(), CUT, None)
    return comm if cut is None or comm.size == 1 else SegmentCommunicator(comm, cut)


@dataclass(frozen=True)
class SegmentCommunicator:
    """A communicator whose collectives cut a capture."""

    inner: Communicator
    cut: Cut

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.inner.size

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """See ``Communicator.all_gather``."""
        return self._noted("all_gather", after, out, shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """See ``Communicator.reduce_scatter``."""
        return self._noted("reduce_scatter", after, out, full, stage, add)

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """See ``Communicator.all_reduce``."""
        return self._noted("all_reduce", after, buffer)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """See ``Communicator.all_to_all``."""
        return self._noted("all_to_all", after, out, full, receive, send)

    def _noted(self, name: str, after: Events, *given: Any) -> Handle:
        assert after is None, "events of a capture order nothing outside of it"
        tensors = tuple([x for x in given if isinstance(x, Tensor)])
        handle = SegmentHandle(name, tensors, self.cut)
        lasting = [on_memory_of(x) if isinstance(x, Tensor) else x for x in given]
        self.cut(HostCall(name, tensors, partial(handle.start, partial(getattr(self.inner, name), *lasting))))
        return handle


@dataclass(eq=False)
class SegmentHandle:
    """The handle of a collective that each replay issues.

    Attributes:
        tensors: what it works on, which the capture must not give to others before its wait.
        flight: the collective that the present replay has issued.
    """

    name: str
    tensors: tuple[Tensor, ...]
    cut: Cut
    flight: list[Handle] = field(default_factory=list)

    def start(self, issue: Callable[[], Handle]) -> None:
        """Issue it: in a replay."""
        self.flight[:] = [issue()]

    def finish(self) -> None:
        """Wait for it: in a replay."""
        self.flight.pop().wait()

    def wait(self) -> None:
        """Note the wait: in the capture."""
        if self.tensors:
            self.cut(HostCall(f"wait {self.name}", self.tensors, self.finish))
            self.tensors = ()
