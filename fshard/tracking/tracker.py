"""Trackers, the guard around each (one that fails never fails the run), and the numbers in a tree of metrics."""

import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from fshard.errors import missing_extra
from fshard.runtime.steps.readings import read
from fshard.threads import outcome_of, started

WAITING = 4096
"""Records that may wait for a tracker that sends them to a server. Further ones are dropped."""


class Tracker(Protocol):
    """A destination of the numbers of a run.

    Only rank 0 calls its methods, in the order ``begin``, ``log`` ..., ``close``.

    A tracker of one's own has these three methods. ``remote = True`` besides says that they may wait for a server: then
    a thread calls them, and the run goes on meanwhile.

    >>> class Printed:
    ...     def begin(self, step, config):
    ...         print("from step", step)
    ...     def log(self, step, scalars):
    ...         print(step, dict(scalars))
    ...     def close(self):
    ...         print("over")
    >>> with fs.track([Printed()], fs.make_mesh((1,), ("data",))) as track:
    ...     track(1, {"loss": 0.5})
    from step 1
    1 {'loss': 0.5}
    over
    """

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Open the run.

        Args:
            step: the first step that will be logged; above 1 if a run is resumed.
            config: what the run was configured with.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """End the run, and write what is left."""


def need(what: str, module: str, library: str, extra: str) -> None:
    """Refuse to be made where a library is not installed: on all ranks alike, before anything runs.

    Raises:
        ImportError: with the extra that installs it.
    """
    top, found = module.partition(".")[0], None
    if find_spec(top) is not None:
        found = find_spec(module)
    if found is None:
        raise missing_extra(what, library, extra)


class Guard:
    """One tracker of a run. Its first failure ends its own records with one warning, and nothing else."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.failure: BaseException | None = None
        self.told = False
        self.dropped = 0
        self._mail: queue.Queue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        if getattr(tracker, "remote", False):
            self._mail = queue.Queue(WAITING)
            self._thread = started(partial(self._serve, self._mail), f"the tracker {type(tracker).__name__}")

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Open the run."""
        self._call(lambda: self.tracker.begin(step, config))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._call(lambda: self.tracker.log(step, scalars))

    def end(self) -> None:
        """End the run. A remote tracker still sends what is left; ``join`` waits for it."""
        self._call(self.tracker.close)
        if self._mail is not None:
            with contextlib.suppress(queue.Full):
                self._mail.put_nowait(None)

    def join(self, deadline: float) -> None:
        """Wait until everything is sent, or until this time of ``time.monotonic``."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._warn("did not take all records in time; the last ones are lost")
        self._tell()

    def _call(self, call: Callable[[], None]) -> None:
        if self.failure is None and self._mail is not None:
            try:
                self._mail.put_nowait(call)
            except queue.Full:
                self.dropped += 1
                if self.dropped == 1:
                    self._warn(f"is {WAITING} records behind: records are dropped until it has caught up")
        elif self.failure is None:
            self._attempt(call)
        self._tell()

    def _attempt(self, call: Callable[[], None]) -> None:
        """Call the tracker. In the thread that trains, Ctrl-C and ``SystemExit`` are of that thread."""
        try:
            call()
        except Exception as error:
            self.failure = error

    def _serve(self, mail: "queue.Queue[Callable[[], None] | None]") -> None:
        """Call the tracker for each record, in its own thread, where nothing but the tracker raises."""
        while (call := mail.get()) is not None:
            if self.failure is None:
                self.failure = outcome_of(call).exception()

    def _tell(self) -> None:
        """Say once that it has failed. A thread leaves that to the thread that trains."""
        if self.failure is not None and not self.told:
            self.told = True
            self._warn(f"has failed and gets no more records: {type(self.failure).__name__}: {self.failure}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"the tracker {self.tracker!r} {what}; training goes on", stacklevel=5)


def scalars(values: Any) -> dict[str, float]:
    """The numbers in a pytree, as plain Python numbers by name; leaves that are no numbers are left out.

    Args:
        values: any tree of dicts, lists and dataclasses with 0-dim tensors, numpy scalars and numbers; what has a
            method ``scalars`` says itself what it holds. Tensors of one element count, others do not. Those on an
            accelerator are read at once.

    >>> fs.trackers.scalars({"loss": torch.tensor(0.5), "gan": {"real": 1, "name": "x"}, "rows": torch.ones(3)})
    {'loss': 0.5, 'gan/real': 1}
    """
    found = dict(_numbers("", values))
    away = [name for name, value in found.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
    found |= zip(away, read([found[name] for name in away]), strict=True)
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers under a value, with names joined by slashes."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            yield name or "value", value.detach()
    elif isinstance(value, bool | int | float):
        yield name or "value", value
    elif hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
        yield name or "value", value.item()
    else:
        for key, inner in _children(value):
            yield from _numbers(f"{name}/{key}" if name else str(key), inner)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The values right inside of a value, with their keys."""
    if hasattr(value, "scalars"):
        yield from value.scalars().items()
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value):
        yield from ((one.name, getattr(value, one.name)) for one in fields(value))
