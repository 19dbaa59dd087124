"""Records as lines of JSON in a file."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from fshard.errors import PlanError
from fshard.reading.texts import parse_json, read_text
from fshard.writing import target, write_whole


class JsonLines:
    """A file with one JSON object a record: ``{"step": 1, "loss": 0.5, ...}``. Needs no library.

    A file that is there goes on. Its lines of steps that a resumed run makes again are dropped first, and so is a line
    that was only half written. Numbers that are not finite are ``NaN``, ``Infinity`` and ``-Infinity``, as Python's own
    ``json`` writes and reads them. Each line is in the file when the next step begins.

    Args:
        path: the file; its folder is made if there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = fs.trackers.JsonLines(f"{folder}/run.jsonl")
    ...     tracker.begin(0, {})
    ...     tracker.log(1, {"loss": 0.5})
    ...     tracker.close()
    ...     fs.trackers.read_lines(f"{folder}/run.jsonl")
    [{'step': 1, 'loss': 0.5}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Open the file. The configuration is not written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if target(self.path).is_file():
            lines = read_text(self.path, sys.maxsize).splitlines()
            foreign = [number for number, line in enumerate(lines[:-1], 1) if _step(line) is None]
            if foreign:
                raise PlanError(
                    f"{self.path} is not a file of records: line {foreign[0]} has no step. Nothing in it was changed; "
                    f"give a path of its own"
                )
            kept = [line for line in lines if (number := _step(line)) is not None and number < step]
            write_whole(self.path, "".join(f"{line}\n" for line in kept))
        self._file = self.path.open("a")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a line."""
        assert self._file is not None
        self._file.write(f"{json.dumps({'step': step, **scalars})}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file of ``JsonLines``, in order.

    Args:
        path: the file.

    Raises:
        PlanError: the file cannot be read, or a line is not JSON, as the last one of a run that was killed
            while it wrote.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write('{"step": 1, "loss": 0.5}')
    ...     file.flush()
    ...     fs.trackers.read_lines(file.name)
    [{'step': 1, 'loss': 0.5}]
    """
    records = []
    for number, line in enumerate(read_text(path, sys.maxsize).splitlines(), 1):
        try:
            records.append(_value(line))
        except ValueError as error:
            raise PlanError(
                f"{os.fspath(path)}: line {number} is not JSON ({error}): remove it. Only the last line of a run that "
                f"was killed can be half written"
            ) from None
    return records


def _value(line: str) -> Any:
    return parse_json(line.encode(), infinite=True)


def _step(line: str) -> float | None:
    """The step of a record; None for a line that is none, such as half a line."""
    try:
        step = _value(line)["step"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return step if isinstance(step, int | float) else None
