"""Failure notes in the store of the job: why a rank left, and what it waits for. Only this module asks a live store.

gloo shows peers a closed connection and no more; and ranks that wait on different communicators cannot tell each
other. The store may be on a host that is frozen or cut off, and then a question to it never ends: it is asked with a
deadline, and a process whose question was not answered in time asks no more. Errors then come without notes.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from fshard.runtime.comm.bounded import bounded

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds that the store gets to answer."""

GATHERING = 1.5
"""Seconds that other ranks get to say what they were calling."""

MOST = 32
"""Ranks whose notes one error quotes."""


class FailureNotes:
    """This process's access to the notes of a job.

    Attributes:
        silent: whether the store did not answer.
    """

    def __init__(self) -> None:
        self.silent = False

    def leave(self, key: str, reason: str) -> None:
        """Leave a note. Where the store is gone, nobody reads it."""
        self._ask(lambda store: store.set(f"fshard/left/{key}", reason), None)

    def reason_of(self, key: str) -> str:
        """The note that was left; empty if there is none, or no answer."""
        return self._ask(lambda store: _read(store, f"fshard/left/{key}"), "")

    def collect(self, keys: Sequence[str], seconds: float) -> list[str]:
        """The notes of these keys, for which their ranks get some time; empty for those that did not come."""
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
            return bounded(lambda: question(_store()), PATIENCE, "a question to the store")
        except Exception:  # the store is gone, or does not answer: errors come without notes
            self.silent = True
        return otherwise


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def _store() -> Any:
    c10d: Any = dist  # whose default store is not among the names that it exports
    return c10d.distributed_c10d._get_default_store()
