"""Small files that are written complete or not at all."""

import contextlib
import os
from pathlib import Path

from fshard.errors import PlanError


def target(path: str | os.PathLike[str]) -> Path:
    """The file that a path names, links followed, if one can be written there.

    Raises:
        PlanError: its folder is missing, or something else than a file has that name, such as a folder or a device.

    >>> target("/proc")
    Traceback (most recent call last):
    fshard.errors.PlanError: /proc cannot be written: it is there already, and is no file: give the path of a file
    """
    found = Path(os.path.realpath(path))
    if not found.parent.is_dir():
        raise PlanError(f"{os.fspath(path)} cannot be written: there is no folder {found.parent}: make it first")
    if os.path.lexists(found) and not found.is_file():
        raise PlanError(
            f"{os.fspath(path)} cannot be written: it is there already, and is no file: give the path of a file"
        )
    return found


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, complete or not at all.

    Raises:
        PlanError: it cannot be written: no such folder, no permission, no room.
    """
    found = target(path)
    unfinished = found.with_name(f"{found.name}.{os.getpid()}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):  # a link there would lead the text elsewhere
            unfinished.unlink()
        unfinished.touch(exist_ok=False)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(found)
    except OSError as error:
        raise PlanError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}: give a path that can be written, with "
            f"room for {len(text):,} bytes"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
