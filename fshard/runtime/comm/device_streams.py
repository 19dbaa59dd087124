"""Streams and events that order work on a device. On the host work runs in program order, so there are no events."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""


class Stream:
    """The host in place of a stream: work runs in program order."""

    asynchronous = False

    def record(self, event: Event | None = None) -> Event | None:
        """An event after all work issued so far on the current stream, or this one; None on the host."""
        return None

    def after(self, after: Iterable[Event | None]) -> AbstractContextManager[object]:
        """Inside, work is issued on the side stream, after the events."""
        return nullcontext()

    def wait_for(self, after: Iterable[Event | None]) -> None:
        """Make later work on the compute stream wait for the events."""


class CudaStream(Stream):
    """A side stream for one communicator, ordered by events."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, event: Event | None = None) -> Event | None:
        """An event after all work issued so far on the current stream; with ``event`` that one, which is reused."""
        made: Event = torch.cuda.current_stream(self.stream.device).record_event(event)  # type: ignore[arg-type]
        return made

    def after(self, after: Iterable[Event | None]) -> AbstractContextManager[object]:
        """Wait for the events on the side stream, and issue work there."""
        for event in after:
            if isinstance(event, torch.cuda.Event):
                self.stream.wait_event(event)
        return torch.cuda.stream(self.stream)

    def wait_for(self, after: Iterable[Event | None]) -> None:
        """Make the current stream wait for the events."""
        for event in after:
            if isinstance(event, torch.cuda.Event):
                torch.cuda.current_stream(self.stream.device).wait_event(event)


def make_stream(device: torch.device) -> Stream:
    """A side stream on a device."""
    return CudaStream(device) if device.type == "cuda" else Stream()


@functools.cache
def copy_stream(device: torch.device, name: str) -> Stream:
    """The side stream of one kind of work, such as copies to the host. All steps and meshes of a device share it."""
    return make_stream(device)


class ComputeOrder:
    """The stream that has worked on some memory, for calls whose current stream is another than before.

    Work that the next call issues comes after all that was issued there. PyTorch gives memory that is freed to the
    stream that it was made on, which may be that of an earlier call: it must know that this one has used it.
    """

    kinds: ClassVar[tuple[str, ...]] = ("cuda",)  # of devices that have streams

    def __init__(self) -> None:
        self.last: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has its own streams."""
        return ComputeOrder, ()

    def follow(self, device: torch.device, memory: Callable[[], Iterable[Tensor]]) -> None:
        """Let the current stream of a device work on this memory."""
        if device.type not in self.kinds:
            return
        now = compute_stream(device)
        if now is None or now == self.last:
            return
        if self.last is not None:
            now.wait_stream(self.last)
            for tensor in memory():
                in_use(tensor)
        self.last = now


def compute_stream(device: torch.device) -> Any:
    """The current stream of a device; None on the host, and where no process has used the device."""
    cuda = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device) if cuda else None


def in_use(tensor: Tensor) -> None:
    """Keep the memory of a tensor, once it is freed, until what the current stream was given so far is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def events(device: torch.device) -> tuple[Event, ...]:
    """An event after all work issued so far on a device's current stream; none on the host."""
    return (torch.cuda.current_stream(device).record_event(),) if device.type == "cuda" else ()
