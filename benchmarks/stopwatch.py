"""When transfers are really over: communicators that have a thread wait for each collective, and note the time.

gloo tells nobody that a message has arrived until somebody waits for it. Threads cost time, so this is for pictures,
and for measures of overlap, not for step times. What goes through shared memory is moved by whoever waits for it, and
one thread alone reads its messages: such a collective counts as over when the step has waited for it.
"""

import threading
import time
from typing import Any

from fshard.runtime.comm.host import HostCommunicator

Spans = list[list[float]]


class Stopwatch:
    """A transport whose communicators note begin and end of every collective.

    Args:
        transport: what does the work.

    Attributes:
        spans: begin and end of each collective, in seconds of ``time.perf_counter``, by its role and axes.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.spans: dict[tuple[str, str], Spans] = {}

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """The communicator of the transport, watched unless it is that of control messages."""
        comm = self.transport.communicator(role, axes)
        if role == "control" or comm.size == 1:
            return comm
        return Watched(comm, self.spans.setdefault((role, "+".join(axes)), []))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class Watched:
    """A communicator."""

    def __init__(self, comm: Any, spans: Spans) -> None:
        self.comm, self.spans, self.size = comm, spans, comm.size

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.comm, name)

        def watched(*args: Any) -> Watch | Noted:
            span = [time.perf_counter(), 0.0]
            self.spans.append(span)
            return (Noted if isinstance(self.comm, HostCommunicator) else Watch)(call(*args), span)

        return watched


class Noted:
    """A collective under way, over when it has been waited for."""

    def __init__(self, handle: Any, span: list[float]) -> None:
        self.handle, self.span = handle, span

    def wait(self) -> None:
        """Wait, and note the time."""
        self.handle.wait()
        self.span[1] = time.perf_counter()


class Watch:
    """A collective under way, and the thread that waits for it."""

    def __init__(self, handle: Any, span: list[float]) -> None:
        self.handle, self.span = handle, span
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait for the thread."""
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        try:
            self.handle.wait()
        except BaseException as error:
            self.error = error
        self.span[1] = time.perf_counter()
