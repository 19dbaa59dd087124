"""When transfers are really over: lanes that have a thread wait for each collective, and note the time.

gloo tells nobody that a message has arrived until somebody waits for it. Threads cost time, so this is for pictures,
and for measures of overlap, not for step times. What goes through shared memory is moved by whoever waits for it, and
one thread alone reads its messages: such a collective counts as over when the step has waited for it.
"""

import threading
import time
from typing import Any

from fshard.runtime.comm.host import HostLane

Spans = list[list[float]]


class Stopwatch:
    """A transport whose lanes note begin and end of every collective.

    Args:
        transport: what does the work.

    Attributes:
        spans: begin and end of each collective, in seconds of ``time.perf_counter``, by role and axes of the lane.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.spans: dict[tuple[str, str], Spans] = {}

    def lane(self, role: str, axes: tuple[str, ...]) -> Any:
        """The lane of the transport, watched unless it is that of control messages."""
        lane = self.transport.lane(role, axes)
        if role == "control" or lane.size == 1:
            return lane
        return Watched(lane, self.spans.setdefault((role, "+".join(axes)), []))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class Watched:
    """A lane."""

    def __init__(self, lane: Any, spans: Spans) -> None:
        self.lane, self.spans, self.size = lane, spans, lane.size

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.lane, name)

        def watched(*args: Any) -> Watch | Noted:
            span = [time.perf_counter(), 0.0]
            self.spans.append(span)
            return (Noted if isinstance(self.lane, HostLane) else Watch)(call(*args), span)

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
