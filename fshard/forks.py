"""Forks: a child process owns nothing of its parent. One callback tells all owners in each child.

An owner holds what two processes cannot share: communicators, a watchdog, a record, the lock of a folder. In a child,
threads of the parent are gone, and its sockets are the parent's. A child that kept them open would hide the death of
its parent from other ranks, and hold its locks; one that used them would break the parent's messages.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    """An owner of what a child of its process must not use."""

    def disown(self, why: str) -> None:
        """In a child: let go of all descriptors, without a message to anybody. Later calls raise ``why``."""


class Forks:
    """The owners of this process.

    Attributes:
        owners: what lives.
        pid: of this process.
    """

    def __init__(self) -> None:
        self.owners: WeakSet[Owner] = WeakSet()
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """This process is a child of the one that made the owners."""
        parent, self.pid = self.pid, os.getpid()
        why = (
            f"this is process {self.pid}, which process {parent} forked, and a child owns nothing of its parent's "
            f"mesh, locks and records: make this call in the parent, or start processes by multiprocessing's "
            f"'spawn' or 'forkserver' and make a mesh there"
        )
        for owner in [*self.owners]:
            with suppress(Exception):
                owner.disown(why)
        self.owners.clear()


@cache
def _forks() -> Forks:
    return Forks()


def own(owner: Owner) -> None:
    """Register an owner of this process, for as long as it lives."""
    _forks().owners.add(owner)


def keep(objects: Iterable[object]) -> None:
    """Keep objects until the process ends. Their destructors would wait for threads that a child does not have."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
