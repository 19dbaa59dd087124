"""Errors of code that is not the library's: which line raised what, in place of a traceback through the library."""

import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fshard.errors import PlanError, ShardError
from fshard.tracebacks import FULL

OURS = str(Path(__file__).parents[1]) + os.sep
"""The folder of the library."""

PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep
"""The folder of Python's own modules."""

BELOW = (f"site-packages{os.sep}torch", f"site-packages{os.sep}optree")
"""Packages that a job calls, whose frames tell its author nothing."""

SHOWN = 3
"""Lines of code that an error names."""


@contextmanager
def named(where: str, remedy: str = "") -> Iterator[None]:
    """Inside, what the code of a job raises is a ``PlanError`` that names its line. Errors of the library stay.

    Args:
        where: ``FILE.py:FUNCTION``, or what else runs.
        remedy: what to do, if there is more to say than the error does.

    Raises:
        PlanError: the code raised something.

    >>> with named("train.py:make"):
    ...     raise SystemExit("no GPU")
    Traceback (most recent call last):
    fshard.errors.PlanError: train.py:make raised SystemExit: no GPU
    """
    try:
        yield
    except ShardError:
        raise
    except (Exception, SystemExit) as error:
        places = [*_places(traceback.extract_tb(error.__traceback__))]
        told = places or isinstance(error, SyntaxError | SystemExit)
        if not told or os.environ.get(FULL) == "full":
            raise  # a defect of the library: all of its frames are of use
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        lines = [f"{where} raised {type(error).__name__}: {error}", *places[-SHOWN:], *notes]
        raise PlanError("\n".join([*lines, *[remedy] * bool(remedy)])) from error


def _places(frames: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    """The lines of code that is neither the library's, nor torch's, nor Python's, the innermost last."""
    for frame in frames:
        file = frame.filename
        pythons = file.startswith(PYTHONS) and "site-packages" not in file
        if not pythons and not file.startswith((OURS, "<")) and not any(f"{name}{os.sep}" in file for name in BELOW):
            yield f"  {file}:{frame.lineno}, in {frame.name}: {frame.line}"
