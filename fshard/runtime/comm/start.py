"""The name of one start of all ranks, which tells it from earlier starts that used the same store.

The store of torchrun's agent outlives the ranks that the agent restarts, and the entries of dead ranks lead nowhere.
PyTorch identifies a start by ``TORCHELASTIC_RESTART_COUNT``. Every agent counts for itself, and does not count when
nodes join or leave, so the ranks of one start may disagree on the count (pytorch/pytorch#135712). Here ranks ask each
other.
"""

import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from fshard.errors import CommError

CALL = "fshard/call"
INTERVAL = 0.02
"""Seconds between two looks at the store."""


def start_name(store: Any, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this start share, and that no other start has. Collective.

    Every rank writes an identity of its own to the store. Rank 0 calls the identities that it finds, including those of
    dead ranks, and calls again when one is replaced. A rank answers the call that contains its identity. When all ranks
    have answered one call, none of its identities is that of a dead rank.

    Args:
        store: the store that all ranks see.
        rank: this one.
        world: how many there are.
        timeout: seconds to wait for the others.

    Raises:
        CommError: some ranks did not answer in time.
    """
    mine = uuid4().hex
    store.set(_here(rank), mine)
    deadline = time.monotonic() + timeout
    for name in _caller(store, world) if rank == 0 else _callee(store, rank, world, mine):
        if name:
            return name
        if time.monotonic() > deadline:
            break
        time.sleep(INTERVAL)
    raise CommError(f"the {world} ranks of this start did not all come within {timeout:g} s: see their logs")


def _caller(store: Any, world: int) -> Iterator[str]:
    """Rank 0: at each look, the name once all ranks have answered, else an empty text."""
    keys, name, called = [_here(rank) for rank in range(world)], "", list[str]()
    while True:
        if store.check(keys):
            found = [store.get(key).decode() for key in keys]
            if found != called:
                called, name = found, uuid4().hex
                store.set(CALL, json.dumps([name, found]))
            others = [f"fshard/{name}/{rank}" for rank in range(1, world)]
            if not others or store.check(others):
                store.set(f"fshard/{name}/go", "")
                yield name
        yield ""


def _callee(store: Any, rank: int, world: int, mine: str) -> Iterator[str]:
    """Any other rank: at each look, the name once rank 0 has heard from all, else an empty text."""
    answered = ""
    while True:
        if store.check([CALL]):
            name, called = json.loads(store.get(CALL))
            if len(called) == world and called[rank] == mine:
                if name != answered:
                    answered = name
                    store.set(f"fshard/{name}/{rank}", "")
                if store.check([f"fshard/{name}/go"]):
                    yield str(name)
        yield ""


def _here(rank: int) -> str:
    return f"fshard/here/{rank}"
