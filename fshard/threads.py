"""The threads of the package, under one supervisor: none ends by an exception, and each failure is told once."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TextIO, TypeVar

T = TypeVar("T")


class Turn:
    """Lets one thread at a time make the collective calls of a mesh; calls inside of its call are part of it.

    Attributes:
        holder: the name of the thread whose call is under way.
        refused: errors of other threads that came meanwhile.
    """

    def __init__(self) -> None:
        self.holder = ""
        self.refused: list[BaseException] = []
        self._lock, self._calls = threading.RLock(), 0

    def take(self) -> bool:
        """Begin a call of this thread, unless one of another thread is under way."""
        if not self._lock.acquire(blocking=False):
            return False
        self._calls += 1
        self.holder = threading.current_thread().name
        return True

    def leave(self) -> list[BaseException]:
        """End a call, and return the errors of threads that were refused, if no call around it goes on."""
        self._calls -= 1
        refused: list[BaseException] = []
        if not self._calls:
            refused, self.refused = self.refused, refused
        self._lock.release()
        return refused


class Supervisor:
    """Runs what a thread does again and again. A failure is told once on standard error, and the thread goes on.

    Args:
        name: of the thread, for the message.

    Attributes:
        told: the classes of exceptions that were told.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: set[type[BaseException]] = set()

    def attempt(self, body: Callable[[], object]) -> BaseException | None:
        """Run a function, and return what it raised, also ``SystemExit``."""
        try:
            body()
        except BaseException as error:
            if type(error) not in self.told:
                self.told.add(type(error))
                say(f"{self.name}: {type(error).__name__}: {error}; it goes on")
            return error
        return None


def say(text: str, out: TextIO | None = None) -> None:
    """Print a line on standard error, or to another file. That may be closed, or have no reader any more."""
    with suppress(Exception):
        print(f"fshard: {text}", file=out or sys.stderr, flush=True)


def outcome_of(body: Callable[[], T]) -> Future[T]:
    """Return what a function returned or raised, as the outcome of a task."""
    outcome: Future[T] = Future()
    settle(outcome, body)
    return outcome


def settle(outcome: Future[T], body: Callable[[], T]) -> None:
    """Run a function, and make what it returns or raises an outcome, for the thread that waits for it."""
    try:
        outcome.set_result(body())
    except BaseException as error:
        outcome.set_exception(error)


def started(body: Callable[[], object], name: str, daemon: bool = True) -> threading.Thread:
    """Start a thread that runs a function under a supervisor.

    Raises:
        RuntimeError: no thread can be started: the interpreter ends, or the process has no room for one.
    """
    thread = threading.Thread(target=Supervisor(name).attempt, args=(body,), name=f"fshard: {name}", daemon=daemon)
    thread.start()
    return thread
