"""Reads whole files of tools: records of ranks, schedules, costs, lines of scalars, configurations.

What is wrong with one is a PlanError with its path. Sizes are bounded, links are followed, and only regular files are
opened.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fshard.errors import CheckpointError, PlanError
from fshard.reading.file_problems import listed, printable
from fshard.reading.files import File, open_file
from fshard.reading.strict_json import parse_json

LARGEST = 64 << 20
"""The most bytes of a file that a tool reads whole."""


def refused(path: str, problems: Iterable[str]) -> PlanError:
    """A file that a tool cannot read."""
    return PlanError(f"{printable(path)} cannot be read: {'; '.join(listed(list(problems)))}")


@contextmanager
def _opened(path: str | os.PathLike[str], most: int) -> Iterator[File]:
    """An open regular file of at most ``most`` bytes; each of its problems is a PlanError."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        with open_file(folder, name, links=True, folder_link=True, refuse=refused) as file:
            if file.size > most:
                raise refused(os.fspath(path), [f"it has {file.size} bytes, of at most {most}"])
            yield file
    except CheckpointError as error:  # of the file system
        raise PlanError(str(error)) from None


def read_bytes(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        PlanError: it is missing, is larger, is no regular file, or cannot be read.
    """
    with _opened(path, most) as file:
        return bytes(file.read(0, file.size))


def read_text(path: str | os.PathLike[str], most: int = LARGEST) -> str:
    """Return the text of a file in UTF-8 of at most ``most`` bytes, without NUL.

    Raises:
        PlanError: it is missing, is larger, is no regular file, cannot be read, or is no text.
    """
    with _opened(path, most) as file:
        content = file.text(0, file.size)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise refused(os.fspath(path), [f"it is not text in UTF-8: {error}"]) from None


def read_json(path: str | os.PathLike[str], most: int = LARGEST, *, infinite: bool = False) -> Any:
    """Return the value of a file of strict JSON; with ``infinite`` numbers may be NaN and Infinity.

    Raises:
        PlanError: as from ``read_text``, or it is not JSON within the bounds of ``parse_json``.
    """
    text = read_text(path, most)
    try:
        return parse_json(text.encode(), infinite=infinite)
    except ValueError as error:
        raise refused(os.fspath(path), [f"it is not JSON: {error}"]) from None
