"""One start of all ranks, told from earlier ones that used the same store.

The store of torchrun's agent outlives the ranks that it starts again, and what dead ranks wrote there leads nowhere.
PyTorch tells starts apart by ``TORCHELASTIC_RESTART_COUNT``; but every agent counts for itself, and not when nodes come
or go, so that the ranks of one start may disagree on it for good (pytorch/pytorch#135712). Here they ask each other.
"""

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fshard.errors import CommError

CALL = "fshard/call"
INTERVAL = 0.02
"""Seconds between two looks at the store."""


def start_name(store: Any, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this start share, and that no other start has. Collective.

    Every rank says that it is here, by an identity of its own. Rank 0 calls those that it finds, dead ones among them,
    and calls anew when one is replaced; a rank answers the call that has its identity. When all have answered one call,
    none of them was dead.

    Args:
        store: the store that all ranks see.
        rank: this one.
        world: how many there are.
        timeout: seconds to wait for the others.

    Raises:
        CommError: they did not come.
    """
    mine = uuid4().hex
    store.set(_here(rank), mine)
    deadline = time.monotonic() + timeout
    look = _Caller(store, world).look if rank == 0 else _answers(store, rank, world, mine)
    while not (name := look()):
        if time.monotonic() > deadline:
            raise CommError(f"the {world} ranks of this start did not all come within {timeout:g} s: see their logs")
        time.sleep(INTERVAL)
    return name


class _Caller:
    """What rank 0 does."""

    def __init__(self, store: Any, world: int) -> None:
        self.store, self.world = store, world
        self.name = ""
        self.called: list[str] = []

    def look(self) -> str:
        """The name, once all ranks have answered to it."""
        keys = [_here(rank) for rank in range(self.world)]
        if not self.store.check(keys):
            return ""
        found = [self.store.get(key).decode() for key in keys]
        if found != self.called:
            self.called, self.name = found, uuid4().hex
            self.store.set(CALL, json.dumps([self.name, found]))
        others = [f"fshard/{self.name}/{rank}" for rank in range(1, self.world)]
        if others and not self.store.check(others):
            return ""
        self.store.set(f"fshard/{self.name}/go", "")
        return self.name


def _answers(store: Any, rank: int, world: int, mine: str) -> Callable[[], str]:
    """What any other rank does: the name, once rank 0 has heard all."""
    answered = [""]

    def look() -> str:
        if not store.check([CALL]):
            return ""
        name, called = json.loads(store.get(CALL))
        if len(called) != world or called[rank] != mine:
            return ""
        if name != answered[0]:
            answered[0] = name
            store.set(f"fshard/{name}/{rank}", "")
        return str(name) if store.check([f"fshard/{name}/go"]) else ""

    return look


def _here(rank: int) -> str:
    return f"fshard/here/{rank}"
