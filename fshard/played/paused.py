"""Ranks of a virtual mesh that stop before every op of a step, until they are told to go on."""

import threading
from collections.abc import Callable
from typing import Any

from fshard.played.cooperative import RankThread, Scheduler, inherited, playing, randomness, restore_randomness
from fshard.runtime.execution.route import Observer
from fshard.schedule.ops import Op
from fshard.sharding.mesh import Mesh

POLL = 0.2
"""Seconds between two looks at whether all ranks have stopped."""


class PausedScheduler(Scheduler, Observer):
    """Runs ranks up to an op that none of them may begin yet.

    Attributes:
        allowed: the first op that no rank may begin.
        at: the op before which each rank is.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.allowed = 0
        self.at: dict[int, int] = {}
        self._stopped = threading.Event()
        self._outside = randomness()

    def start(self, body: Callable[[], Any]) -> None:
        """Start all ranks, and run them up to their first op."""
        inherit = inherited()
        self.threads = [RankThread(self, rank, inherit(body)) for rank in range(self.size)]
        for thread in self.threads:
            thread.randomness = self._outside
            thread.start()
        self._go(self.threads[0])

    def begin(self, at: int, op: Op) -> None:
        """Stop here until this op may begin. Called by a rank."""
        thread = playing()
        assert thread is not None
        self.at[thread.rank] = at
        if at >= self.allowed:
            self.wait(thread, lambda: at < self.allowed, f"leave to begin op {at}")

    def idle(self) -> bool:
        """Tell whether all ranks that still run have stopped before an op that may not begin."""
        running = [thread for thread in self.threads if not thread.ended]
        stopped = bool(running) and all(self.at.get(thread.rank, -1) >= self.allowed for thread in running)
        if stopped:
            self._stopped.set()
        return stopped

    def go(self, allowed: int) -> None:
        """Let all ranks run up to this op, or to their end."""
        self.allowed = allowed
        thread = next((thread for thread in self.threads if thread.runnable()), None)
        if thread is not None:
            self._go(thread)

    def results(self) -> list[Any]:
        """Return what the ranks have returned, once all have ended.

        Raises:
            BaseException: as ``run``.
        """
        self._raise()
        return [thread.result for thread in self.threads]

    @property
    def over(self) -> bool:
        """Tell whether all ranks have ended."""
        return all(thread.over.is_set() for thread in self.threads)

    def interrupt(self) -> None:
        """Let each rank raise ``KeyboardInterrupt`` where the loss function of its step runs next."""
        for thread in self.threads:
            thread.interrupted = True

    def _go(self, thread: RankThread) -> None:
        self._stopped.clear()
        self.current = thread
        thread.turn.release()
        while not self._stopped.wait(POLL) and not self.over:
            continue
        restore_randomness(self._outside)
