"""Ends what a rank's device waits for when another rank's program has failed, while the host cannot be reached.

Over NCCL a loss function that reads its device waits there for collectives of the program. If another rank has failed,
they never end, and no exception reaches this rank: it is inside of CUDA. A rank that fails leaves a note in the store
of the job. The watchdog's thread looks for it where a program takes long, and aborts the communicators of the program:
the read returns, and the step fails as on all ranks. NCCL's own watchdog aborts from a thread, too, after its timeout.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fshard.runtime.comm.watchdog import Watchdog

PATIENCE = 2.0
"""Seconds of a program before the first look, so that ranks of short steps never ask the store."""


class Cuts:
    """The notes of programs that have failed, by the number of the program, which is equal on all ranks.

    Args:
        watchdog: of the rank; its thread looks, and it knows the store.
        rank: this one.
        abort: ends what this rank's device waits for; later collectives of the program fail.

    Attributes:
        turn: how many programs have begun.
        since: when the present one began; None between programs.
    """

    def __init__(self, watchdog: Watchdog, rank: int, abort: Callable[[str], None]) -> None:
        self.watchdog, self.rank, self.abort = watchdog, rank, abort
        self.turn, self.since = 0, float("inf")
        self.lock = threading.Lock()
        watchdog.looks.append(self.look)

    @contextmanager
    def program(self) -> Iterator[None]:
        """While a program of all ranks runs."""
        with self.lock:
            self.turn, self.since = self.turn + 1, time.monotonic()
        self.watchdog.start()
        try:
            yield
        finally:
            with self.lock:
                self.since = float("inf")

    def tell(self, reason: str) -> None:
        """This rank's program has failed: leave a note for ranks whose devices wait for it."""
        if self.since != float("inf"):
            self.watchdog.notes.leave(self._key(self.turn), f"rank {self.rank} gave up: {reason}")

    def look(self) -> None:
        """Abort the collectives of a program that takes long, if another rank has failed in it."""
        turn, since = self.turn, self.since
        if time.monotonic() - since < PATIENCE or not (reason := self.watchdog.notes.reason_of(self._key(turn))):
            return
        with self.lock:  # the program may just have ended, and the next one begun
            if (self.turn, self.since) == (turn, since):
                self.since = float("inf")
                self.abort(reason)

    def _key(self, turn: int) -> str:
        return f"{self.watchdog.name}/failed/{turn}"
