"""Reads whole files of tools: records of ranks, schedules, costs, lines of scalars, configurations; and untrusted JSON.

What is wrong with one is a PlanError with its path. Sizes are bounded, links are followed, and only regular files are
opened.

JSON is weighed before it is parsed: a short text can become a large value (``[],`` takes three bytes, and a list some
sixty), and a deep text can overflow the interpreter's stack. One pass over the bytes, linear in time and memory,
estimates the depth and the size of the value, and only a text within bounds is parsed.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fshard.errors import CheckpointError, PlanError
from fshard.reading.files import File, listed, open_file, printable

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


DEPTH = 200
"""The most nested objects and lists."""

SPACE = 64 << 20
"""The bytes of memory that the value of any text may take."""

FACTOR = 16
"""The bytes of memory for each byte of a longer text. Headers and manifests take some ten."""

DIGITS = 4000
"""The most digits of a number."""

BLOCK = 1 << 20
"""Bytes that are weighed at a time."""

OBJECT, LIST, ITEM = 240, 88, 40
"""The approximate bytes of memory of an object, of a list, and of each further value in one."""


def parse_json(text: bytes, most: int | None = None, *, infinite: bool = False) -> Any:
    """The value of a text that is strict JSON; ``most`` is a further bound on the bytes of memory that it takes.

    With ``infinite`` a number may also be NaN, Infinity or -Infinity, as in logs of losses.

    The text must be UTF-8 without repeated keys, NaN or Infinity, within the bounds on depth, memory and digits above;
    a ValueError says which rule it breaks.

    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    check_bounds(text, most)
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_once,
            parse_constant=float if infinite else _never,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:  # the caller is deep in its own stack
        raise ValueError("it is nested too deeply") from None


def check_bounds(text: bytes, most: int | None = None) -> None:
    """Raise a ValueError for a text whose value would be too deep or too large, without parsing it."""
    depth, size = weigh(text)
    if depth > DEPTH:
        raise ValueError(f"it is nested too deeply: {depth} objects and lists inside of each other, of at most {DEPTH}")
    bound = max(SPACE, FACTOR * len(text))
    bound = bound if most is None else min(bound, most)
    if size > bound:
        raise ValueError(f"its {len(text)} bytes would take some {size} bytes of memory, of at most {bound}")


def weigh(text: bytes) -> tuple[int, int]:
    """The depth of a text and the approximate bytes of its value. Exact for JSON up to its first mistake.

    >>> weigh(b'{"a": [[1], "]"]}')[0]
    3
    """
    # Without escapes each quote begins or ends a string, so every other part lies outside of strings.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = deepest = 0
    size = len(text)
    inside = 0
    for at in range(0, len(plain), BLOCK):
        parts = plain[at : at + BLOCK].split(b'"')
        outside = b",".join(parts[inside::2])  # a comma for each string, which is a value of its own
        inside = (inside + len(parts) - 1) % 2
        objects, lists = outside.count(b"{"), outside.count(b"[")
        size += OBJECT * objects + LIST * lists + ITEM * outside.count(b",")
        ends = outside.count(b"}") + outside.count(b"]")
        if objects + lists or ends:
            codes = torch.frombuffer(bytearray(outside), dtype=torch.uint8) | 0x20  # [ ] become { }
            steps = (codes == 0x7B).to(torch.int32) - (codes == 0x7D).to(torch.int32)
            deepest = max(deepest, depth + int(steps.cumsum(0).max()))
            depth += objects + lists - ends
    return deepest, size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} occurs twice")
            seen.add(name)
    return out


def _never(constant: str) -> float:
    raise ValueError(f"{constant[:40]} is not a number that JSON and Python share")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) and len(digits) <= DIGITS else _never(digits)


def _whole(digits: str) -> int:
    return int(digits) if len(digits) <= DIGITS else int(_never(digits))
