"""Threads of gloo, and when they may take a processor from the thread that computes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "gloo_tcp_loop"
"""What gloo calls the thread of each process group that carries messages."""

hand_over = getattr(os, "sched_yield", lambda: None)
"""Lets threads run that wait for this processor."""


@contextmanager
def without_interrupting() -> Iterator[None]:
    """Inside, gloo's groups are made whose threads wait for a processor until it is free, or a slice of time is over.

    A send holds the lock of its connection. The answer wakes gloo's thread, often on the processor of the sender, which
    it interrupts; it tries the lock, does not get it, and tries again without a pause (pytorch/gloo#246). So both stand
    still until the kernel takes the processor from it, 2 to 4 ms later. Linux does not let threads of ``SCHED_BATCH``
    interrupt others when they wake: the send goes on, and gloo's thread follows. Where processors are free nothing
    changes. What has been given another policy than the usual one keeps it.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with suppress(OSError):  # it is over, or may not be changed here
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """The threads of this process by which gloo carries messages; none where the system is not Linux."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm") if hasattr(os, "SCHED_BATCH") else ():
        with suppress(OSError):
            if path.read_text().strip() == NAME:
                found.add(int(path.parent.name))
    return found
