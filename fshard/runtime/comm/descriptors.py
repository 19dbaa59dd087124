"""Sockets that PyTorch opens for this process alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fshard.forks import own
from fshard.runtime.comm.ending import Sockets, ending, open_sockets


class Descriptors:
    """The sockets that were opened inside of ``opening``: other programs do not inherit them, and children close them.

    PyTorch's own are inherited by every program that this process starts, such as a shell. Their peers see that this
    process has died only when the last of these has ended.

    Attributes:
        sockets: their numbers and identities.
        forked: whether this process is a child of the one that opened them.
    """

    def __init__(self) -> None:
        self.sockets: Sockets = set()
        self.forked = False
        own(self)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Inside, PyTorch opens sockets."""
        before = open_sockets()
        try:
            yield
        finally:
            opened = open_sockets() - before
            self.sockets |= opened
            ending().sockets |= opened
            for number, _ in opened:
                with suppress(OSError):
                    os.set_inheritable(number, False)

    def disown(self, why: str) -> None:
        """Close those that are still open."""
        for number, _ in self.sockets & open_sockets():
            with suppress(OSError):
                os.close(number)
        self.sockets.clear()
        self.forked = True
