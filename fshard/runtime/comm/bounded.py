"""Calls with a deadline, for functions that may never return.

PyTorch's store has no timeout if its host is frozen or cut off: then ``check``, ``get`` and ``wait`` never return. So
every call of a store runs in a daemon thread, which does not keep the process alive when it ends (``ending.py``).
"""

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from fshard.runtime.comm.call_site import HelperThread
from fshard.runtime.comm.devices import carried
from fshard.runtime.comm.ending import ending
from fshard.threads import settle

T = TypeVar("T")

LOOK = 0.25
"""Seconds between two looks."""


def bounded(body: Callable[[], T], seconds: float, what: str, look: Callable[[], object] | None = None) -> T:
    """Return what a function returns, or raise what it raises, if it ends in time.

    Args:
        body: the function. It runs in another thread, which continues after a timeout.
        seconds: how long to wait.
        what: what the function does, for the error.
        look: called a few times a second meanwhile; what it raises ends the wait.

    Raises:
        TimeoutError: it did not end in time.
    """
    return bounded_together([body], seconds, what, look)[0]


def bounded_together(
    bodies: Sequence[Callable[[], T]], seconds: float, what: str, look: Callable[[], object] | None = None
) -> list[T]:
    """Return what functions return that run at once, each in a thread. All of them begin, whatever others do.

    Args:
        bodies: the functions.
        seconds: how long to wait for all of them.
        what: what they do, for the error.
        look: called a few times a second meanwhile; what it raises ends the wait.

    Raises:
        TimeoutError: one did not end in time.
        BaseException: what the first one raised that failed.
    """
    begun = [_begun(body, what) for body in bodies]
    given, end = seconds, time.monotonic() + seconds
    while futures.wait(begun, min(LOOK, seconds) if look is not None else seconds).not_done:
        if look is not None and (seconds := end - time.monotonic()) > 0:
            look()
            continue
        raise TimeoutError(f"timed out after {given:g} s: {what} did not end")
    return [outcome.result() for outcome in begun]


def _begun(body: Callable[[], T], what: str) -> Future[T]:
    """The outcome of a function that another thread runs."""
    outcome: Future[T] = Future()
    body = carried(body)
    ending()
    try:
        HelperThread(lambda: settle(outcome, body), what).start()
    except RuntimeError as error:  # at the end of the interpreter, or where the process has no room for a thread
        outcome.set_exception(TimeoutError(f"{what} was not begun: {error}"))
    return outcome
