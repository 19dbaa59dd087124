"""A watchdog thread for waits. It needs no other rank.

A wait for another rank registers itself in a table, which costs a tuple. For a wait that lasts some seconds, the thread
leaves a note in the store with this rank's call and line; after ten seconds it prints one line that says which rank
waits for which. A rank whose program has been at one op of its schedule for as long, or between two steps, leaves a
note, too: others may wait for it. Errors quote the notes of all ranks. If a wait lasts well beyond its timeout, the
thread prints the error and ends the process.

Stacks are read only where something waits for long. Whether the program goes on is seen by the record of its ops.
The thread holds no reference to the watchdog between two looks, so a mesh that nobody holds ends.
"""

import atexit
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from fshard.errors import CommError, lines
from fshard.forks import own
from fshard.runtime.comm.call_site import op_of, place
from fshard.runtime.comm.failure_notes import GATHERING, MOST, FailureNotes
from fshard.runtime.comm.pending import GONE
from fshard.runtime.flight.recorder import Flight, Stamp
from fshard.threads import Supervisor, say

LONG = 10.0
"""Seconds of a wait after which a line is printed."""

LAST = 4.5
"""Seconds of a wait beyond its timeout after which the process ends."""

STATUS = 70
"""The exit status of a process that the watchdog has ended."""

ASKED = "what each rank was calling:"
"""Ends the first line of an error that has been explained."""

LATE = "imed out"
"""A part of the text of errors of waits that took too long."""

STUCK = (LATE, "another collective", "different calls")
"""Parts of error texts which say that ranks may be at different calls."""

SAME = "All ranks must make the same calls of the library in one order."
"""The remedy where ranks may be at different calls."""

Wait = tuple[str, int]
"""A collective that waits, and the rank that it waits for, -1 if unknown."""


@dataclass
class Seen:
    """A wait, and for how long the thread has seen it."""

    wait: Wait
    seconds: float = 0.0


@dataclass
class Told:
    """The note that was left; the last stamp of the program, for how long it has been that, and when to look next."""

    text: str = ""
    stamp: Stamp | None = None
    seconds: float = 0.0
    next: float = 0.0

    def due(self, stamp: Stamp | None, tick: float, early: float) -> bool:
        """Tell whether to look where the program is.

        After some seconds at one stamp, after twice as many, and so on.
        """
        if stamp is None or stamp != self.stamp:
            self.stamp, self.seconds, self.next = stamp, 0.0, early
            return False
        self.seconds += tick
        if self.seconds < self.next:
            return False
        self.next *= 2
        return True


class Watchdog:
    """Watches the waits of one rank.

    Args:
        rank: this one, in its mesh.
        timeout: seconds that a wait may take.
        abort_all: tells the other ranks that this one cannot continue.
        out: the file for printed lines; None for standard error.
        flight: the record of this rank.

    Attributes:
        notes: the failure notes of the job.
        name: of the mesh, equal on its ranks, so that meshes do not share notes.
        waits: the wait of each thread, by its identity. Waits add and remove themselves.
        looks: what else its thread calls at each tick.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        abort_all: Callable[[str], object],
        out: TextIO | None = None,
        flight: Flight | None = None,
    ) -> None:
        self.rank, self.timeout, self.abort_all, self.out, self.flight = rank, timeout, abort_all, out, flight
        self.notes, self.name = FailureNotes(), "start"
        self.waits: dict[int, Wait] = {}
        self.looks: list[Callable[[], None]] = []
        self.seen: dict[int, Seen] = {}
        self.told, self.failed = Told(), False
        self.closed = threading.Event()
        self.early = min(LONG, timeout / 2)
        self.thread: threading.Thread | None = None
        own(self)

    def disown(self, why: str) -> None:
        """Watch nothing: the thread is the parent's, and so may be the lock of the event."""
        self.closed = threading.Event()
        self.closed.set()

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.early / 4)

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self.thread is None and not self.closed.is_set():
            mine, name = weakref.ref(self), "fshard: who waits for whom"
            self.thread = threading.Thread(target=_run, args=(mine, self.closed, self.tick), name=name, daemon=True)
            self.thread.start()
            atexit.register(_ended, mine)

    def close(self) -> None:
        """End the thread."""
        self.closed.set()

    def end(self) -> None:
        """The process ends. Between steps that is no reason for a record."""
        self.close()
        if self.flight is not None and self.flight.between:
            self.flight.withdraw()

    @contextmanager
    def waiting(self, what: str, rank: int = -1) -> Iterator[None]:
        """Register a wait for the duration of the context."""
        me = threading.get_ident()
        before, self.waits[me] = self.waits.get(me), (what, rank)
        try:
            yield
        finally:
            if before is None:
                del self.waits[me]
            else:
                self.waits[me] = before

    @contextmanager
    def explaining(self, ranks: Sequence[int], fatal: bool) -> Iterator[None]:
        """Add to errors inside what each rank was calling, if ranks may be at different calls, and where records are.

        Args:
            ranks: those that take part.
            fatal: whether no rank can continue after an error; then all connections are closed first.

        Raises:
            CommError: the error, with the calls of the ranks.
        """
        try:
            yield
        except CommError as error:
            text = str(error)
            stuck = any(word in text for word in STUCK)
            if ASKED not in text:
                text = self._explained(text, ranks, fatal, stuck)
            if (where := hosts_in(text, self.notes.hosts)) not in text:
                text = f"{text}\n{where}"
            if self.flight is not None and (fatal or LATE in text):  # else all ranks go on, from a mistake
                left = self.flight.leave(str(error))
                text = f"{text}\n{left}" if left not in text else text
            if text != str(error):
                raise CommError(text) from error
            raise

    def _explained(self, text: str, ranks: Sequence[int], fatal: bool, stuck: bool) -> str:
        """The text of an error, with the calls of the ranks if they may be at different ones."""
        own = place()
        self.failed = True
        if fatal and (stuck or GONE in text):
            self.abort_all(f"CommError: {text} (at {own})")
        self._tell(own)
        others = [rank for rank in ranks if rank != self.rank][: MOST - 1]
        notes = self.notes.collect([self._key(rank) for rank in others], GATHERING if stuck else 0.0)
        if not stuck and not any(notes):
            return text  # a rank has ended, and cannot leave a note: no need to wait for one
        told = {self.rank: own, **dict(zip(others, notes, strict=True))}
        why = "the store does not answer" if self.notes.silent else "it is frozen, gone or elsewhere"
        rows = [f"rank {rank}: {told[rank] or f'no answer: {why}'}" for rank in sorted(told)]
        remedy = SAME if stuck else "See the logs of ranks that have ended."
        return lines(f"{text}; {ASKED}", rows, remedy)

    def look(self) -> None:
        """Look once at all waits, and where there are none, at the program."""
        now = self.waits.copy()
        for thread, wait in now.items():
            last = self.seen.get(thread)
            if last is None or last.wait is not wait:
                self.seen[thread] = Seen(wait)
            else:
                self._look(thread, last)
        self.seen = {thread: seen for thread, seen in self.seen.items() if thread in now}
        if not self.seen and not self.failed:
            self._look_at(threading.main_thread().ident)

    def _look_at(self, main: int | None) -> None:
        """Act on a program that is for long at one op, or between two steps: in a data loader, say."""
        stamp = self.flight.stamp if self.flight is not None else None
        if self.flight is not None and self.told.due(stamp, self.tick, self.early):
            between = self.flight.between
            known = between or op_of(main)
            self._leave(", ".join(filter(None, (between, place(main)))) if known else "")
        elif self.told.seconds < self.early:
            self._leave("")

    def _look(self, thread: int, seen: Seen) -> None:
        """Act on a wait that has lasted one tick more."""
        before, seen.seconds = seen.seconds, seen.seconds + self.tick
        if before < self.early <= seen.seconds:
            self._leave(place(thread))
        if before < LONG <= seen.seconds:
            self._say(f"rank {self.rank} has waited {LONG:g} s {self._for(seen.wait)}; it is at {place(thread)}")
        if seen.seconds > self.timeout + LAST:
            told = (
                f"CommError: rank {self.rank} has waited {seen.seconds:.0f} s {self._for(seen.wait)}, longer than its "
                f"timeout of {self.timeout:g} s, at {place(thread)}; the wait cannot be ended otherwise, so the "
                f"process ends with status {STATUS}"
            )
            if self.waits.get(thread) is seen.wait:  # while the store answered, the wait may have ended
                self._say(told)
                os._exit(STATUS)

    def _for(self, wait: Wait) -> str:
        what, rank = wait
        if rank < 0:
            return f"for other ranks in {what}"
        note = self.notes.reason_of(self._key(rank))
        return f"for rank {rank} in {what}" + (f" (rank {rank} is at {note})" if note else "")

    def _leave(self, text: str) -> None:
        """Leave a note, and this rank's record as long as the note is there."""
        before = self.told.text
        self._tell(text)
        if self.flight is not None and text and not before:
            self.flight.leave(text, lasting=False)
        elif self.flight is not None and before and not text:
            self.flight.withdraw()

    def _tell(self, text: str) -> None:
        if text != self.told.text:
            self.told.text = text
            self.notes.leave(self._key(self.rank), text)

    def _say(self, text: str) -> None:
        say(text, self.out)

    def _key(self, rank: int) -> str:
        return f"{self.name}/at/{rank}"


def hosts_in(text: str, hosts: Mapping[int, str]) -> str:
    """The hosts of the ranks that a text names; empty if all ranks are on one.

    >>> hosts_in("rank 2 has waited for rank 0", {0: "a", 1: "a", 2: "b"})
    'Hosts: rank 0 on a, rank 2 on b'
    """
    named = sorted({int(number) for number in re.findall(r"\brank (\d+)", text)} & hosts.keys())
    if len(set(hosts.values())) < 2 or not named:
        return ""
    return f"Hosts: {', '.join(f'rank {rank} on {hosts[rank]}' for rank in named)}"


def _run(watchdog: "weakref.ref[Watchdog]", closed: threading.Event, tick: float) -> None:
    """Let a watchdog look until it is closed, or nobody holds it. A look that fails does not end it."""
    supervisor = Supervisor("the thread that looks who waits for whom")
    while not closed.wait(tick):
        found = watchdog()
        if found is None:
            return
        for look in (*found.looks, found.look):
            supervisor.attempt(look)
        del found, look


def _ended(watchdog: "weakref.ref[Watchdog]") -> None:
    found = watchdog()
    if found is not None:
        found.end()
