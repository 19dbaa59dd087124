"""Failure notes in the store of the job: why a rank left, and what it waits for. Only this module asks a live store.

Over gloo, peers see a closed connection but no reason, and ranks that wait on different communicators cannot reach each
other. The store may be on a host that is frozen or cut off, and then its calls never return. So each call has a
deadline, and after the first one that misses it the process does not call the store again: errors then have no notes.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from fshard.forks import own
from fshard.runtime.comm.bounded import bounded
from fshard.torch_internals import default_store

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds for an answer of the store."""

GATHERING = 1.5
"""Seconds for other ranks to leave their notes."""

MOST = 32
"""Ranks whose notes one error quotes."""


class FailureNotes:
    """This process's access to the notes of a job.

    Attributes:
        silent: whether the store did not answer.
        hosts: the name of each rank's host, once the ranks have met.
    """

    def __init__(self) -> None:
        self.silent = False
        self.hosts: dict[int, str] = {}
        own(self)

    def disown(self, why: str) -> None:
        """Ask the store no more, whose socket is the parent's."""
        self.silent = True

    def leave(self, key: str, reason: str) -> None:
        """Leave a note, if the store answers."""
        self._ask(lambda store: store.set(f"fshard/left/{key}", reason), None)

    def reason_of(self, key: str) -> str:
        """The note of a key; empty if there is none, or no answer."""
        return self._ask(lambda store: _read(store, f"fshard/left/{key}"), "")

    def collect(self, keys: Sequence[str], seconds: float) -> list[str]:
        """The notes of these keys, waiting for at most some seconds; empty for those that are missing then."""
        deadline, found = time.monotonic() + seconds, [""] * len(keys)
        while not self.silent:
            for at, key in enumerate(keys):
                found[at] = found[at] or self.reason_of(key)
            if all(found) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        if self.silent or not dist.is_initialized():
            return otherwise
        try:
            return bounded(lambda: question(default_store()), PATIENCE, "a question to the store")
        except Exception:  # the store is gone, or does not answer: errors come without notes
            self.silent = True
        return otherwise


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""
