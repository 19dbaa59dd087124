"""Ends what a rank's device waits for when another rank has failed, while the host cannot be reached.

Over NCCL a program that reads its device waits there for collectives. If another rank has failed, they never end, and
no exception reaches this rank: it is inside of CUDA. A rank that fails leaves a note in the store of the job, under
the name of each communicator that it closes. The watchdog's thread looks for the notes of this rank's communicators
where a program takes long, and aborts them: the read returns, and the program is a failed one. A program is that of a
step, the reads at its end, a call of ``shard_map``, or a ``use_mesh`` block. NCCL's own watchdog aborts from a thread,
too, after its timeout.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from fshard.errors import CommError
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.watchdog import Watchdog

PATIENCE = 2.0
"""Seconds of a program before the first look, so that ranks of short ones never ask the store."""


class Cuts:
    """The notes of programs that have failed, by the name of a communicator, which is equal on its ranks.

    Args:
        watchdog: of the rank; its thread looks, and it knows the store.
        rank: this one.
        waiting: the communicators for which this rank's device may wait, by role.
        abort: ends what it waits for, when another rank has closed one of a role's communicators for this reason.

    Attributes:
        since: when a program last began, or one inside of it ended; infinite outside of programs.
        told: why communicators were aborted in the present program; empty if none were.
        graphs: what holds graphs of steps, which call communicators.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        rank: int,
        waiting: Callable[[], Mapping[str, Sequence[NcclCommunicator]]],
        abort: Callable[[str, Sequence[NcclCommunicator], str], object],
    ) -> None:
        self.watchdog, self.rank, self.waiting, self.abort = watchdog, rank, waiting, abort
        self.since, self.told = float("inf"), ""
        self.graphs: WeakSet[Any] = WeakSet()
        watchdog.looks.append(self.look)

    def drop_graphs(self) -> None:
        """Drop the graphs of steps, before communicators that they call end. On any thread."""
        for each in [*self.graphs]:
            each.drop()

    @contextmanager
    def program(self) -> Iterator[None]:
        """While a program of all ranks runs, which may hold others.

        Raises:
            CommError: another rank has failed, so that what this one has read of its device means nothing.
        """
        before, self.since = self.since, time.monotonic()
        if before == float("inf"):
            self.told = ""
        self.watchdog.start()
        try:
            yield
        finally:
            self.since = time.monotonic() if before != float("inf") else before
            told, self.told = self.told, ""
        if told:
            raise CommError(f"the device waited for a rank that has failed: {told}")

    def tell(self, closed: Sequence[NcclCommunicator], reason: str) -> None:
        """This rank has failed: leave a note for ranks whose devices wait for it."""
        for comm in closed:
            if not comm.closed:
                self.watchdog.notes.leave(self._key(comm), f"rank {self.rank} gave up: {reason}")

    def look(self) -> None:
        """Look whether another rank has failed, where a program takes long."""
        if time.monotonic() - self.since < PATIENCE:
            return
        for role, comms in self.waiting().items():
            reasons = [self.watchdog.notes.reason_of(self._key(comm)) for comm in comms if not comm.closed]
            still = [comm for comm in comms if not comm.closed]  # while the store answered, this rank may have failed
            if any(reasons) and still:
                self.told = next(filter(None, reasons))
                self.abort(role, still, self.told)

    def _key(self, comm: NcclCommunicator) -> str:
        return f"{self.watchdog.name}/failed/{comm.key}"
