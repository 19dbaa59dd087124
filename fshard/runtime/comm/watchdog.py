"""Who waits for whom: a thread that looks at the waits of a process, and needs no other rank for it.

A wait for another rank notes itself in a table, for the price of a tuple. The thread sees those that last: after some
seconds it tells the other ranks, by a note in the store, what its rank is calling and where; after ten it says in one
line who waits for whom. An error quotes the notes of all ranks. A wait that has not ended well after its time ends the
process, with the error: nothing that hangs is left hanging.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from fshard.errors import CommError, lines
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.failure_notes import GATHERING, MOST, FailureNotes

LONG = 10.0
"""Seconds after which a line says who waits for whom."""

LAST = 4.5
"""Seconds that a wait may last beyond its timeout before the process ends."""

STATUS = 70
"""The exit status of a process that ended itself since a wait did not."""

ASKED = "what each rank was calling:"
"""Ends the first line of an error that has been explained."""

STUCK = ("imed out", "another collective", "different calls")
"""What texts of errors hold where ranks may be at different calls."""


Wait = tuple[str, int]
"""A wait that is under way: a collective, and the rank that is waited for, -1 where it is not known."""


@dataclass
class Seen:
    """A wait, and how long it has lasted as far as the thread has seen."""

    wait: Wait
    seconds: float = 0.0


class Watchdog:
    """Looks at the waits of one rank.

    Args:
        rank: this one, in its mesh.
        timeout: seconds that a wait may take.
        lose: tells the other ranks that this one is out of step for good.
        out: where lines are written; standard error unless it is given.

    Attributes:
        notes: where ranks leave notes.
        name: of the mesh, equal on its ranks, so that notes of others are not taken for theirs.
        waits: what each thread waits for, by its identity. A wait puts itself there, and takes itself away.
    """

    def __init__(self, rank: int, timeout: float, lose: Callable[[str], None], out: TextIO | None = None) -> None:
        self.rank, self.timeout, self.lose, self.out = rank, timeout, lose, out
        self.notes, self.name = FailureNotes(), "start"
        self.waits: dict[int, Wait] = {}
        self.seen: dict[int, Seen] = {}
        self.told, self.failed = "", False
        self.closed = threading.Event()
        self.early = min(LONG, timeout / 2)
        self.tick = min(1.0, self.early / 4)
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it is not there yet."""
        if self.thread is None and not self.closed.is_set():
            self.thread = threading.Thread(target=self._run, name="fshard: who waits for whom", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """End the thread."""
        self.closed.set()

    @contextmanager
    def waiting(self, what: str, rank: int = -1) -> Iterator[None]:
        """Note a wait as long as the context lasts."""
        me = threading.get_ident()
        before, self.waits[me] = self.waits.get(me), (what, rank)
        try:
            yield
        finally:
            if before is None:
                del self.waits[me]
            else:
                self.waits[me] = before

    def explain(self, error: CommError, ranks: Sequence[int], fatal: bool) -> None:
        """Say what each rank was calling, where an error may come from ranks that are at different calls.

        Args:
            error: of a wait of this thread.
            ranks: those that were to take part.
            fatal: whether no rank can go on, so that all of them shall learn of it before they are asked.

        Raises:
            CommError: the error, with that.
        """
        if ASKED in str(error):
            return
        own, stuck = call_site(), any(word in str(error) for word in STUCK)
        self.failed = True
        if fatal and stuck:
            self.lose(f"{type(error).__name__}: {error} (at {own})")
        self._tell(own)
        others = [rank for rank in ranks if rank != self.rank][: MOST - 1]
        notes = self.notes.collect([self._key(rank) for rank in others], GATHERING if stuck else 0.0)
        if not stuck and not any(notes):
            return  # a rank has ended: the others need not wait for what it cannot say
        told = {self.rank: own, **dict(zip(others, notes, strict=True))}
        silent = "the store that would tell does not answer" if self.notes.silent else "frozen, gone or elsewhere"
        rows = [f"rank {rank}: {told[rank] or f'it did not say: {silent}'}" for rank in sorted(told)]
        remedy = "All ranks must make the same calls of the library in one order."
        raise CommError(lines(f"{error}; {ASKED}", rows, remedy)) from error

    def _run(self) -> None:
        while not self.closed.wait(self.tick):
            now = dict(self.waits)
            for thread, wait in now.items():
                last = self.seen.get(thread)
                if last is None or last.wait is not wait:
                    self.seen[thread] = Seen(wait)
                else:
                    self._look(thread, last)
            self.seen = {thread: seen for thread, seen in self.seen.items() if thread in now}
            if self.told and not self.seen and not self.failed:
                self._tell("")

    def _look(self, thread: int, seen: Seen) -> None:
        """A wait that lasts one tick more."""
        before, seen.seconds = seen.seconds, seen.seconds + self.tick
        if before < self.early <= seen.seconds:
            self._tell(call_site(thread))
        if before < LONG <= seen.seconds:
            self._say(f"rank {self.rank} has waited {LONG:g} s {self._for(seen.wait)}; it is at {call_site(thread)}")
        if seen.seconds > self.timeout + LAST:
            self._say(
                f"CommError: rank {self.rank} has waited {seen.seconds:.0f} s {self._for(seen.wait)}, longer than its "
                f"timeout of {self.timeout:g} s, at {call_site(thread)}; the wait cannot be ended otherwise, so the "
                f"process ends with status {STATUS}"
            )
            os._exit(STATUS)

    def _for(self, wait: Wait) -> str:
        what, rank = wait
        if rank < 0:
            return f"for other ranks in {what}"
        note = self.notes.reason_of(self._key(rank))
        return f"for rank {rank} in {what}" + (f" (rank {rank} is at {note})" if note else "")

    def _tell(self, text: str) -> None:
        if text != self.told:
            self.told = text
            self.notes.leave(self._key(self.rank), text)

    def _say(self, text: str) -> None:
        print(f"fshard: {text}", file=self.out or sys.stderr, flush=True)

    def _key(self, rank: int) -> str:
        return f"{self.name}/at/{rank}"
