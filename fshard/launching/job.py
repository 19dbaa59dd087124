"""Parcels for ranks and back: a function, its arguments and the text of its cells; a result or an error."""

import dis
import json
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fshard.errors import LaunchError, PlanError, lines
from fshard.runtime.comm.call_site import OURS

JOB, STORE, STATUS = "job", "store", "status"
LAUNCHED = "FSHARD_LAUNCHED"
"""The environment variable of launched ranks."""

SOURCES = 4 << 20
"""Characters of cells that are sent, at most."""


@dataclass(frozen=True)
class Setting:
    """Facts that a rank needs before it can read the function.

    Attributes:
        folder: where files of the launch lie.
        ranks: how many.
        path: ``sys.path`` of the caller, so that ranks import what it imports.
        cwd: the folder that the caller is in.
    """

    folder: str
    ranks: int
    path: list[str]
    cwd: str

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def pickler() -> Any:
    """cloudpickle, which sends functions of cells and scripts by value; ``pickle`` where it is missing."""
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return pickle
    return cloudpickle


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """A function with its arguments, and the cells that it may be from, for tracebacks.

    Raises:
        PlanError: something cannot be sent to another process: it is named.
    """
    dumps = pickler().dumps
    if pickler() is pickle and getattr(fn, "__module__", "__main__") == "__main__":
        raise PlanError(
            f"fs.launch: {_name(fn)} is defined in a notebook or a script, and only cloudpickle can send it to other "
            f'processes: pip install "fshard[notebook]"'
        )
    try:
        body: bytes = dumps((fn, args, dict(kwargs)))
    except Exception as error:
        raise PlanError(_unsent(fn, args, kwargs, dumps, error)) from None
    return pickle.dumps((_cells(), body))


def unpacked(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments, on a rank. Tracebacks there show the lines of cells."""
    cells, body = pickle.loads(data)
    for name, text in cells.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.loads(body)
    return found


def write_result(folder: Path, rank: int, value: Any) -> None:
    """Leave what the function returned on a rank.

    Raises:
        PlanError: it cannot be sent.
    """
    try:
        data = pickler().dumps(("result", value))
    except Exception as error:
        raise PlanError(
            f"fs.launch: the result of rank {rank}, {_kind(value)}, cannot be sent back: {_first(error)}. Return "
            f"numbers, tensors or fs.unshard(state.params, plan)"
        ) from None
    _write(folder, rank, data)


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Leave an exception of a rank, with the lines of the user that led to it."""
    text = "\n".join([f"on rank {rank}:", *_own_frames(error)])
    try:
        data = pickler().dumps(("error", error.with_traceback(None), text))
        pickle.loads(data)  # some exceptions can be written and not read
    except Exception:
        data = pickle.dumps(("error", LaunchError(f"{type(error).__name__}: {error}"), text))
    _write(folder, rank, data)


def read_outcome(folder: Path, rank: int) -> tuple[Any, ...] | None:
    """``("result", value)`` or ``("error", exception, text)``; None if the rank left nothing."""
    try:
        data = (folder / f"outcome.{rank}").read_bytes()
    except FileNotFoundError:
        return None
    found: tuple[Any, ...] = pickle.loads(data)
    return found


def _write(folder: Path, rank: int, data: bytes) -> None:
    part = folder / f"outcome.{rank}.part"
    part.write_bytes(data)
    part.rename(folder / f"outcome.{rank}")


def _own_frames(error: BaseException) -> list[str]:
    """The lines of a traceback that are the user's; all of them if there is none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [pair for pair in frames if not str(pair[0].f_globals.get("__name__", "")).startswith((*OURS, "cloudpickle"))]
    summary = traceback.StackSummary.extract(iter(own or frames))
    return "".join(summary.format()).rstrip().splitlines()


def _cells() -> dict[str, str]:
    """The text of the cells of this notebook, by the names that tracebacks know them by."""
    found, left = {}, SOURCES
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and not os.path.exists(name) and left > 0:
            found[name] = "".join(entry[2])
            left -= len(found[name])
    return found


def _unsent(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], dumps: Any, error: Exception
) -> str:
    """Say which of the values that a function uses cannot be sent."""
    used = dict(_used(fn))
    used |= {f"argument {number}": value for number, value in enumerate(args)}
    used |= {f"{name}=": value for name, value in kwargs.items()}
    wrong = []
    for name, value in used.items():
        try:
            dumps(value)
        except Exception as why:
            wrong.append(f"{name}, {_kind(value)}: {_first(why)}")
    head = f"fs.launch: {_name(fn)} cannot be sent to other processes: it uses"
    return lines(head, wrong or [_first(error)], "Make these inside of the function, on each rank.")


def _used(fn: Any) -> Iterator[tuple[str, Any]]:
    """The globals that a function reads, and what it closes over."""
    if not isinstance(fn, FunctionType):
        yield _name(fn), fn
        return
    names = {name for code in _codes(fn.__code__) for name in _globals(code)}
    yield from ((name, fn.__globals__[name]) for name in sorted(names) if name in fn.__globals__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _globals(code: CodeType) -> set[str]:
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def setting_of(folder: str, ranks: int) -> Setting:
    """The setting of a launch from here."""
    return Setting(folder, ranks, [path or os.getcwd() for path in sys.path], os.getcwd())


def log_of(folder: str, rank: int) -> str:
    """The file that a rank other than 0 writes to."""
    return os.path.join(folder, f"log.{rank}")
