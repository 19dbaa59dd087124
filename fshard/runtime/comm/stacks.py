"""The stacks of threads: which functions a thread is in.

A thread reads its own frames. Those of another thread it must not touch: CPython 3.11 makes and ends frames lazily, and
following ``f_back`` in a thread that runs on meanwhile ends the process now and then
(https://github.com/python/cpython/issues/111363). faulthandler writes stacks down in one call that holds the
interpreter, and makes no frames.
"""

import faulthandler
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2]
OURS = f"{PACKAGE}{os.sep}"

THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
"""The line that begins a thread's stack."""

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
"""The line of a frame."""


class CodePlace(NamedTuple):
    """A function that a thread is in, and where: its module, empty if unknown; qualified name; file and line."""

    module: str
    function: str
    file: str
    line: int


def stack_of(thread: int | None = None) -> Iterator[CodePlace]:
    """The functions that a thread is in, innermost first; none if it has ended.

    Of another thread these are the innermost hundred at most, and functions outside of this package have the names that
    they have in their sources: ``forward``, not ``Block.forward``.

    Args:
        thread: its identity; None for the current thread.

    >>> next(iter(stack_of())).function
    '<module>'
    """
    if thread is None or thread == threading.get_ident():
        return _own(sys._getframe(1))
    return _told(_dumped(), thread)


def _own(frame: FrameType | None) -> Iterator[CodePlace]:
    while frame is not None:
        code = frame.f_code
        yield CodePlace(str(frame.f_globals.get("__name__", "")), code.co_qualname, code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _dumped() -> str:
    """The stacks of all threads, as faulthandler writes them; empty where no file can be made."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode("ascii", "replace")
    except OSError:
        return ""


def _told(text: str, thread: int) -> Iterator[CodePlace]:
    """The stack of one thread from a text of faulthandler."""
    current = None
    for line in text.splitlines():
        if begun := THREAD.match(line):
            current = int(begun[1], 16)
        elif current == thread and (found := FRAME.match(line)):
            file, name, number = _unescaped(found[1]), _unescaped(found[3]), int(found[2])
            yield CodePlace(_module(file), _qualified(file, number, name), file, number)


def _unescaped(text: str) -> str:
    r"""A name as it was; faulthandler writes all but ASCII as ``\xe9``, ``\u4e2d`` or ``\U0001f600``."""
    return re.sub(r"\\(?:x(..)|u(.{4})|U(.{8}))", lambda found: chr(int(found[found.lastindex or 1], 16)), text)


@cache
def _module(file: str) -> str:
    """The module of a file, empty if none that is loaded comes from it."""
    if file.startswith(OURS):
        return ".".join(Path(file).relative_to(PACKAGE.parent).with_suffix("").parts)
    every = sys.modules.copy()  # other threads import meanwhile
    return next((name for name, module in every.items() if _file_of(module) == file), "")


def _file_of(module: object) -> object:
    """The file of a module. A lazy one, which loads when it is asked for an attribute, is not asked."""
    try:
        return object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return None


def _qualified(file: str, line: int, name: str) -> str:
    """The qualified name of a function of this package, from its source; other names stay as they are."""
    within = [each for each in _functions(file) if each[0] <= line <= each[1] and each[2].rpartition(".")[2] == name]
    return max(within)[2] if within else name  # the one that begins last is the innermost


@cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """First line, last line and qualified name of the functions of a file of this package.

    They are those of its code: CPython 3.11 may fail to make a syntax tree while another thread makes one
    (https://github.com/python/cpython/issues/106905).
    """
    try:
        codes = [compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)] if file.startswith(OURS) else []
    except (OSError, SyntaxError):
        codes = []
    found: list[tuple[int, int, str]] = []
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        found.append((code.co_firstlineno, max(line for *_, line in code.co_lines() if line), code.co_qualname))
    return found
