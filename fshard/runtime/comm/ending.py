"""The end of a process: threads that wait inside of C++ return before the interpreter ends.

A thread that returns from C++ while the interpreter ends cannot have its lock. Python ends such a thread where it is,
and C++ answers by ``abort``: the process gets status -6 in place of its own, and "terminate called without an active
exception" below its error. So it is with a thread that asks the store of a job whose host ends at the same time. At
exit, before Python ends, connections of PyTorch are shut down while such threads are there: their calls return at once.
Sockets that PyTorch opens for this process alone are found here, too.
"""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from fshard.errors import CommError, PeerError
from fshard.forks import own
from fshard.runtime.comm.call_site import HelperThread
from fshard.tracebacks import FULL

Sockets = set[tuple[int, str]]
"""Numbers of descriptors, and the identities of their sockets."""

SOON, LATE = 0.1, 2.0
"""Seconds that threads get to end, before connections are shut down and after."""

LAG = 1.0
"""Seconds by which a rank that another one has failed ends later: torchrun takes the first to end for the cause."""

AGENT = "TORCHELASTIC_RUN_ID"
"""The environment variable of ranks that torchrun's agent has started."""

FOLDER, ERRORS = "/proc/self/fd", 2


class Ending:
    """The work at the end of this process.

    Attributes:
        sockets: those of PyTorch that were opened for the library.
    """

    def __init__(self) -> None:
        self.sockets: Sockets = set()
        atexit.register(self.end)

    def end(self) -> None:
        """Let threads return that wait inside of C++; where one does not, end with the status of the error."""
        error = uncaught()
        if isinstance(error, CommError | PeerError) and AGENT in os.environ:
            time.sleep(LAG)
        if left(SOON):
            with quiet():
                for number, _ in self.sockets & open_sockets():
                    shut_down(number)
                late = left(LATE)
            if late and error is not None:
                os._exit(1)


@cache
def ending() -> Ending:
    """The end of this process."""
    return Ending()


def left(seconds: float) -> list[HelperThread]:
    """Threads that wait for others in place of the program, and have not ended within some seconds."""
    deadline = time.monotonic() + seconds
    found = [thread for thread in threading.enumerate() if isinstance(thread, HelperThread)]
    for thread in found:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in found if thread.is_alive()]


def uncaught() -> BaseException | None:
    """The uncaught error that ends this process. An interactive session outlives its errors."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if sys.flags.interactive or hasattr(sys, "ps1") else error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence PyTorch's C++, which tells of each connection that ends with a stack."""
    for file in (sys.stdout, sys.stderr):
        with suppress(Exception):
            file.flush()
    if os.environ.get(FULL) == "full":
        yield
        return
    kept, nowhere = os.dup(ERRORS), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, ERRORS)
    try:
        yield
    finally:
        os.dup2(kept, ERRORS)
        os.close(kept)
        os.close(nowhere)


def shut_down(number: int) -> None:
    """Let all calls that wait at a connection return. Listening sockets have none."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
        if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            end.shutdown(socket.SHUT_RDWR)


def open_sockets() -> Sockets:
    """The open sockets of this process; none where the system does not tell."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(FOLDER):
            with suppress(OSError):  # the descriptor of the listing itself
                target = os.readlink(f"{FOLDER}/{name}")
                if target.startswith("socket:"):
                    found.add((int(name), target))
    return found


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
