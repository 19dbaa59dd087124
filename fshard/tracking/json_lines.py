"""Records as lines of JSON in a file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLines:
    """A file with one JSON object a record: ``{"step": 1, "loss": 0.5, ...}``. Needs no library.

    A file that is there goes on. Its lines of steps that a resumed run makes again are dropped first, and so is a line
    that was only half written. Numbers that are not finite are ``NaN``, ``Infinity`` and ``-Infinity``, as Python's own
    ``json`` writes and reads them. Each line is in the file when the next step begins.

    Args:
        path: the file; its folder is made if there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = JsonLines(f"{folder}/run.jsonl")
    ...     tracker.begin(0, {})
    ...     tracker.log(1, {"loss": 0.5})
    ...     tracker.close()
    ...     read_lines(f"{folder}/run.jsonl")
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
        if self.path.is_file():
            lines = self.path.read_text().splitlines()
            foreign = [number for number, line in enumerate(lines[:-1], 1) if _step(line) is None]
            if foreign:
                raise ValueError(
                    f"{self.path} is not a file of records: line {foreign[0]} has no step. Nothing in it was changed; "
                    f"give a path of its own"
                )
            kept = [line for line in lines if (number := _step(line)) is not None and number < step]
            beside = self.path.with_name(f"{self.path.name}.new")
            beside.write_text("".join(f"{line}\n" for line in kept))
            beside.replace(self.path)
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
        OSError: the file cannot be read.
        ValueError: a line is not JSON, such as the last one of a run that was killed while it wrote.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write('{"step": 1, "loss": 0.5}')
    ...     file.flush()
    ...     read_lines(file.name)
    [{'step': 1, 'loss': 0.5}]
    """
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _step(line: str) -> float | None:
    """The step of a record; None for a line that is none, such as half a line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return step if isinstance(step, int | float) else None
