"""Calls that may never return, such as those to the store of a host that is frozen, and the time that they are given.

PyTorch's store has no timeout of its own where its host is frozen or cut off: ``check`` and ``get`` never return, and
``wait`` returns neither. So every call that may ask it runs in a thread of its own. A thread that never ends is a
daemon: it holds nothing back when the process ends.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from fshard.runtime.comm.call_site import HelperThread

T = TypeVar("T")


def bounded(body: Callable[[], T], seconds: float, what: str) -> T:
    """What a function returns or raises, if it does so in time.

    Args:
        body: the function. It runs in another thread, which goes on when the time is over.
        seconds: how long to wait.
        what: what it does, for the error.

    Raises:
        TimeoutError: the time is over.
    """
    done: list[tuple[T | None, BaseException | None]] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            done.append((body(), None))
        except BaseException as error:  # raised by the thread that waits
            done.append((None, error))

    thread = HelperThread(run, what)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"timed out after {seconds:g} s: {what} did not end")
    value, error = done[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # what the body returned
