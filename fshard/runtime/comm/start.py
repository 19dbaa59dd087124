"""The name of one start of all ranks, which tells it from earlier starts that used the same store.

The store of torchrun's agent outlives the ranks that the agent restarts, and the entries of dead ranks lead nowhere.
PyTorch identifies a start by ``TORCHELASTIC_RESTART_COUNT``. Every agent counts for itself, and does not count when
nodes join or leave, so the ranks of one start may disagree on the count (pytorch/pytorch#135712). Here ranks ask each
other.

gloo connects ranks at the address that a host's own name has. Many systems give that name to 127.0.1.1, which leads
other hosts to themselves: "Connection refused", far from the cause. So the interface is found here, too.
"""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from fshard.errors import CommError

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which gloo is told an interface."""

ELSEWHERE = "192.0.2.1"
"""An address of no host: the way to it is the way to other networks. Nothing is sent."""

ADDRESS_OF = 0x8915
"""The request for the address of an interface (``SIOCGIFADDR`` of Linux)."""


def interface(environment: Mapping[str, str]) -> str:
    """The interface to name to gloo; empty where it needs none, or where nobody can tell.

    Args:
        environment: with torchrun's variables.
    """
    alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    master = environment.get("MASTER_ADDR", "")
    if VARIABLE in environment or alone or not _leads_here(socket.gethostname()):
        return ""
    if _leads_here(master) and "LOCAL_WORLD_SIZE" not in environment:
        return ""  # all ranks of a job that was started by hand may be here
    return _named(_own_address(ELSEWHERE if _leads_here(master) else master))


def _leads_here(host: str) -> bool:
    """Tell whether the address of a host is one of this host alone, or there is none."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def _own_address(other: str) -> str:
    """The address of this host on the way to another; empty without a way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
    return ""


def _named(address: str) -> str:
    """The interface that has an address of other hosts' use; empty if there is none."""
    if not address or address.startswith("127."):
        return ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", os.fsencode(name)[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF, asked)[20:24]) == address:
                    return name
    return ""


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
