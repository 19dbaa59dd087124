"""Signals while a step runs: they interrupt the program of the user, and never what ranks do together.

Python runs the handler of a signal between any two of its instructions, and Ctrl-C raises there. In the middle of a
collective that would leave the ranks out of step for good. So a step holds signals back while it communicates, and
lets them through where the loss function runs, where an exception is a failure like any other.
"""

import _signal  # type: ignore[import-not-found]  # ``signal`` looks each handler up in an enum: 1 % of a small step
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from fshard.tracebacks import hide

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that wait for a step. SIGALRM does not: it ends what takes too long."""

HELD_LOCALLY = (*HELD, signal.SIGALRM)
"""The signals that wait for work which waits for no other rank."""

ENOUGH = 3
"""A signal that comes for the third time is let through wherever the step is: somebody wants out of a wait."""


class Shield:
    """Holds signals back while it is entered and not open.

    Handlers are taken over for the time of a step alone, only in the main thread, and only those that are Python
    functions; they are called as they would have been, at the latest when the step is over. What one raises then, after
    all ranks have made the step, is kept for the next one.

    Args:
        late: what a handler raised when it was too late for the step before; it is raised in this one.
        numbers: the signals.

    Attributes:
        open: whether a handler may raise now.
        late: what is still to be raised.
    """

    def __init__(self, late: BaseException | None = None, numbers: Sequence[int] = HELD) -> None:
        self.open, self.late, self.numbers = False, late, numbers
        self.kept: dict[int, Callable[[int, Any], Any]] = {}
        self.held: list[int] = []
        self.count = 0
        self.rank: Any = None  # the thread of a played rank, which is interrupted by a mark on it

    def __enter__(self) -> Self:
        thread = threading.current_thread()
        if hasattr(thread, "shields"):
            self.rank = thread
            thread.shields += 1
        elif thread is threading.main_thread():
            for number in self.numbers:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self.kept[number] = handler
                    _signal.signal(number, self._arrive)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.rank is not None:
            self.rank.shields -= 1
        if error is not None:
            hide(error)
        for number, handler in self.kept.items():
            _signal.signal(number, handler)
        while self.held:
            waiting = self.held.pop(0)
            if kind is not None:
                self.kept[waiting](waiting, None)  # the step did not happen: now is as good a time as any
                continue
            try:  # it is made, on all ranks, and raising here would take its result away from the caller
                self.kept[waiting](waiting, None)
            except BaseException as error:
                self.late = self.late or error

    def reopen(self) -> None:
        """Let signals through again, first those that came meanwhile."""
        if self.late is not None:
            error, self.late = self.late, None
            raise error
        if self.rank is not None and self.rank.interrupted:
            raise KeyboardInterrupt
        self.open = True
        while self.held:
            self._let_through(self.held.pop(0))

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hold signals back inside. After an error they stay held: ranks have to come together first."""
        before, self.open = self.open, False
        yield
        if before:
            self.reopen()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let signals through inside."""
        try:
            self.reopen()
            yield
        finally:
            self.open = False

    def _arrive(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.open or self.count >= ENOUGH:
            self._let_through(number, frame)
        else:
            self.held.append(number)

    def _let_through(self, number: int, frame: Any = None) -> None:
        # At most one handler raises: what follows its exception must not be interrupted again.
        before, self.open = self.open, False
        self.kept[number](number, frame)
        self.open = before


@contextmanager
def held_back(numbers: Sequence[int] = HELD) -> Iterator[Shield]:
    """Hold signals back while what is inside must not stop half way. What their handlers raise is raised after it."""
    with Shield(numbers=numbers) as shield:
        yield shield
    if shield.late is not None:
        raise shield.late
