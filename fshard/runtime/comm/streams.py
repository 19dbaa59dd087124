"""Order between streams. On the host everything is in program order and a mark is nothing; on CUDA it is an event."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the work before the mark is done."""


class Stream:
    """The host's clock: one thread, no streams, so there is nothing to order."""

    asynchronous = False

    def record(self) -> Event | None:
        """A mark after everything issued so far on the compute stream."""
        return None

    def after(self, after: Iterable[Event | None]) -> AbstractContextManager[object]:
        """Inside, work is issued beside the compute stream, once the events are passed."""
        return nullcontext()

    def wait_for(self, after: Iterable[Event | None]) -> None:
        """What is issued on the compute stream from here on waits for these events."""


class CudaStream(Stream):
    """One side stream a communicator, ordered against the compute stream by events. Not yet measured on hardware."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self) -> Event | None:
        """An event after everything issued so far on the current stream."""
        event: Event = torch.cuda.current_stream(self.stream.device).record_event()
        return event

    def after(self, after: Iterable[Event | None]) -> AbstractContextManager[object]:
        """The side stream, made to wait for the events first."""
        for mark in after:
            if isinstance(mark, torch.cuda.Event):
                self.stream.wait_event(mark)
        return torch.cuda.stream(self.stream)

    def wait_for(self, after: Iterable[Event | None]) -> None:
        """The current stream waits for the events."""
        for mark in after:
            if isinstance(mark, torch.cuda.Event):
                torch.cuda.current_stream(self.stream.device).wait_event(mark)


def make_stream(device: torch.device) -> Stream:
    """The clock of one communicator on a device."""
    return CudaStream(device) if device.type == "cuda" else Stream()


def events(device: torch.device) -> tuple[Event, ...]:
    """A mark after everything issued so far on a device's current stream; none on the host."""
    return (torch.cuda.current_stream(device).record_event(),) if device.type == "cuda" else ()
