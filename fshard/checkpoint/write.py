"""The files that one rank writes: its slices of the state, hashed while they are written."""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from torch import Tensor

from fshard.checkpoint.manifest import CHUNK, Extent, FileInfo
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.tensorfile import TensorMeta, write_header
from fshard.sharding.layout import ALIGN
from fshard.state.pieces import Entry
from fshard.threads import outcome_of

T = TypeVar("T", memoryview, Tensor)

SPLIT = 1 << 14
"""Bytes of a replicated piece below which one of its holders writes all of it."""
FILE_BYTES = 1 << 29
"""Bytes of data in a file, about. Data of other devices take host memory while their file is written."""
BATCH = 8
"""Chunks that a thread hashes and writes at a time."""


def owned(entries: Sequence[Entry], rank: int) -> list[Slice]:
    """Return what a rank writes of its entries, so that one rank writes each element of each tensor.

    The ranks that hold a large piece write equal ranges of it; a small piece is written by the holder that has least to
    write. All ranks compute the same answer from the sizes alone.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    out = []
    for entry in entries:
        count, nbytes = entry.piece.numel, entry.piece.numel * entry.dtype.itemsize
        load = loads.setdefault(entry.holders, [0] * len(entry.holders))
        place = entry.holders.index(rank)
        begin, end = 0, count
        if nbytes >= SPLIT and len(load) > 1:
            begin, end = equal_range(count, place, len(load))
        else:
            chosen = load.index(min(load))
            load[chosen] += nbytes
            end = count if chosen == place else 0
        if end > begin:
            out.append(Slice(entry.name, entry.piece, entry.tensor).cut(begin, end))
    return out


def equal_range(count: int, place: int, places: int) -> tuple[int, int]:
    """One of as many equal ranges of ``count`` elements, aligned."""
    step = -(-count // places // ALIGN) * ALIGN
    return min(count, place * step), min(count, (place + 1) * step)


def packed(slices: Sequence[Slice], limit: int = FILE_BYTES) -> Iterator[list[Slice]]:
    """Slices grouped into files of at most ``limit`` bytes of data; larger slices are cut."""
    here: list[Slice] = []
    room = limit
    for whole in slices:
        rest, size = whole, whole.data.element_size()
        while rest.nbytes > room:
            fits = room // size // ALIGN * ALIGN
            if fits:
                here.append(rest.cut(0, fits))
                rest = rest.cut(fits, rest.data.numel())
            if here:
                yield here
            here, room = [], max(limit, ALIGN * size)
        here.append(rest)
        room -= rest.nbytes
    if here:
        yield here


def write_files(folder: str, rank: int, parts: Iterable[Sequence[Slice]]) -> dict[str, Any]:
    """Write each part to a file, synced to disk before the next; returns the files and the extents of each tensor.

    The result is JSON, with rows as in a manifest.
    """
    files: dict[str, Any] = {}
    extents: dict[str, list[Any]] = {}
    hashers = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(max_workers=hashers + 1, thread_name_prefix="fshard-write") as pool:
        for number, part in enumerate(parts):
            name = f"rank-{rank:05d}-{number:03d}.safetensors"
            info, held = write_file(folder, name, part, pool)
            files[name] = info.row()
            for tensor, extent in held.items():
                extents.setdefault(tensor, []).append(extent.row())
    return {"files": files, "extents": extents}


def write_file(
    folder: str, name: str, slices: Sequence[Slice], pool: ThreadPoolExecutor
) -> tuple[FileInfo, dict[str, Extent]]:
    """Write one file; returns it and the extent of each slice. A thread writes what it has just hashed."""
    # Larger elements first, so that each tensor is aligned. On the CPU nothing is copied.
    ordered = [replace(s, data=s.data.cpu()) for s in sorted(slices, key=lambda s: -s.data.element_size())]
    tensors = {s.name: TensorMeta((s.data.numel(),), s.data.dtype) for s in ordered}
    header = write_header(tensors, {"format": "pt", "fshard": name})
    parts = [memoryview(header), *(raw(s.data) for s in ordered)]
    chunks = list(chunked(parts, CHUNK))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, name), flags, 0o644)
    tasks: list[Future[list[str]]] = []
    try:
        for at in range(0, len(chunks), BATCH):
            tasks.append(_submitted(pool, partial(_place, fd, at * CHUNK, chunks[at : at + BATCH])))
        digests = [digest for task in tasks for digest in task.result()]
        os.fsync(fd)
    finally:
        for task in tasks:  # after an error: no thread may use the tensors or the file once this returns
            if not task.cancel():
                with suppress(Exception):
                    task.result()
        os.close(fd)
    ends = accumulate((s.nbytes for s in ordered), initial=len(header))
    extents = {s.name: Extent(name, at, s.piece) for s, at in zip(ordered, ends, strict=False)}
    return FileInfo(sum(map(len, parts)), tuple(digests)), extents


def _submitted(pool: ThreadPoolExecutor, task: Callable[[], list[str]]) -> Future[list[str]]:
    """A task of a pool. While the interpreter ends, no thread can be started: then it is done here."""
    try:
        return pool.submit(task)
    except RuntimeError:
        return outcome_of(task)


def _place(fd: int, start: int, chunks: Sequence[Sequence[memoryview]]) -> list[str]:
    """Hash chunks and write each to its place in a file; returns the hashes."""
    digests, at = [], start
    for views in chunks:
        chunk = views[0] if len(views) == 1 else memoryview(b"".join(views))
        digests.append(hashlib.sha256(chunk).hexdigest())
        while chunk:
            done = os.pwrite(fd, chunk, at)
            at, chunk = at + done, chunk[done:]
    begin_sync = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux; elsewhere fsync writes all
    if begin_sync is not None:
        begin_sync(fd, ctypes.c_int64(start), ctypes.c_int64(at - start), 2)  # SYNC_FILE_RANGE_WRITE
    return digests


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which must outlive the view."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")


def chunked(parts: Sequence[T], size: int) -> Iterator[list[T]]:
    """The bytes of all parts in chunks of ``size``, each a list of views.

    >>> [*chunked([b"abcde", b"", b"fg"], 4)]
    [[b'abcd'], [b'e', b'fg']]
    """
    chunk: list[T] = []
    room = size
    for part in parts:
        while len(part):
            piece, part = part[:room], part[room:]
            chunk.append(piece)
            room -= len(piece)
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


@contextmanager
def synced(path: str | Path, mode: Literal["wb", "xb"] = "wb") -> Iterator[BinaryIO]:
    """A file to write, which is on disk when the block is over."""
    with open(path, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when it is complete and on disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with synced(partial) as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
