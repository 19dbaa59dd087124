"""Short tracebacks: the frames of this library are marked as hidden, for those who respect that.

IPython and pytest leave out frames whose local variable ``__tracebackhide__`` is true, and say how many. So a notebook
shows the user's lines and the message, and nothing is installed, replaced or cut off: a plain ``python`` and debuggers
show every frame, and so does a notebook if ``FSHARD_TRACEBACKS=full`` is in its environment.
"""

import os
from types import TracebackType

INTERNALS = ("fshard.", "optree.", "torch._", "torch.nn.modules.module", "torch.autograd", "torch.utils", "threading")
"""Modules whose frames tell a user nothing."""

FULL = "FSHARD_TRACEBACKS"


def hide(error: BaseException) -> None:
    """Mark the frames of internals in the traceback of an error, and in those of its causes."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen and os.environ.get(FULL) != "full":
        seen.add(id(found))
        _mark(found.__traceback__)
        found = found.__cause__ or found.__context__


def shorten(error: BaseException) -> None:
    """Leave out the causes of an error, and the frames through which it came so far: its text has the cause.

    All of them stay if the environment has ``FSHARD_TRACEBACKS=full``.
    """
    if os.environ.get(FULL) != "full":
        error.__cause__, error.__suppress_context__, error.__traceback__ = None, True, None


def _mark(trace: TracebackType | None) -> None:
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name == "fshard" or name.startswith(INTERNALS):
            trace.tb_frame.f_locals["__tracebackhide__"] = True
        trace = trace.tb_next
