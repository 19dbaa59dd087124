"""What one rank writes: its slices of the state, and the files that hold them, hashed while they are written."""

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fshard.checkpoint.manifest import CHUNK, Extent, FileInfo
from fshard.checkpoint.tensorfile import write_header
from fshard.sharding.layout import ALIGN, Piece
from fshard.sharding.spec import Shape
from fshard.state.entries import Entry

SPLIT = 1 << 14
"""Bytes of a replicated piece below which one of its holders writes all of it."""
FILE_BYTES = 1 << 29
"""Bytes of data in a file, about. Data of other devices take host memory while their file is written."""
BATCH = 8
"""Chunks that a thread hashes and writes at a time."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A part of a tensor that this rank writes: the elements of a piece, 1-D and contiguous."""

    name: str
    piece: Piece
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.data.numel() * self.data.element_size()

    def cut(self, begin: int, end: int) -> "Slice":
        """Its elements ``begin`` to ``end``."""
        piece = replace(self.piece, start=self.piece.start + begin, stop=self.piece.start + end)
        return Slice(self.name, piece, self.data[begin:end])


def owned(entries: Sequence[Entry], rank: int) -> list[Slice]:
    """What a rank writes of its entries, so that one rank writes each element of each tensor.

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
            step = -(-count // len(load) // ALIGN) * ALIGN
            begin, end = min(count, place * step), min(count, (place + 1) * step)
        else:
            chosen = load.index(min(load))
            load[chosen] += nbytes
            end = count if chosen == place else 0
        if end > begin:
            out.append(Slice(entry.name, entry.piece, entry.tensor).cut(begin, end))
    return out


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


def write_files(folder: str, rank: int, slices: Sequence[Slice], limit: int = FILE_BYTES) -> "Written":
    """Write a rank's slices to files of about ``limit`` bytes, each synced to disk before the next."""
    written = Written({}, {})
    with ThreadPoolExecutor(max_workers=hashers() + 1, thread_name_prefix="fshard-write") as pool:
        for number, part in enumerate(packed(slices, limit)):
            name = f"rank-{rank:05d}-{number:03d}.safetensors"
            write_file(folder, name, part, pool, written)
    return written


@dataclass(frozen=True)
class Written:
    """The files that were written, and their extents by the tensor's name."""

    files: dict[str, FileInfo]
    extents: dict[str, list[Extent]]


def hashers() -> int:
    """The number of threads that hash."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def write_file(folder: str, name: str, slices: Sequence[Slice], pool: ThreadPoolExecutor, written: Written) -> None:
    """Write one file and add it to ``written``. A thread writes the chunk that it has just hashed, from the cache."""
    # Larger elements first, so that each tensor is aligned. On the CPU nothing is copied.
    ordered = [replace(s, data=s.data.cpu()) for s in sorted(slices, key=lambda s: -s.data.element_size())]
    shapes: dict[str, tuple[torch.dtype, Shape]] = {s.name: (s.data.dtype, (s.data.numel(),)) for s in ordered}
    header = write_header(shapes, {"format": "pt", "fshard": name})
    parts = [memoryview(header), *(raw(s.data) for s in ordered)]
    chunks = list(chunked(parts, CHUNK))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, name), flags, 0o644)
    tasks: list[Future[list[str]]] = []
    try:
        for at in range(0, len(chunks), BATCH):
            tasks.append(pool.submit(_place, fd, at * CHUNK, chunks[at : at + BATCH]))
        digests = [digest for task in tasks for digest in task.result()]
        os.fsync(fd)
    finally:
        for task in tasks:  # after an error: no thread may use the tensors or the file once this returns
            if not task.cancel():
                with suppress(Exception):
                    task.result()
        os.close(fd)
    written.files[name] = FileInfo(sum(map(len, parts)), tuple(digests))
    at = len(header)
    for s in ordered:
        written.extents.setdefault(s.name, []).append(Extent(name, at, s.piece))
        at += s.nbytes


def _place(fd: int, start: int, chunks: Sequence[Sequence[memoryview]]) -> list[str]:
    """Hash chunks and write each to its place in a file; returns the hashes."""
    digests, at = [], start
    for chunk in chunks:
        digests.append(digest(chunk))
        write_all(fd, list(chunk), at)
        at += sum(map(len, chunk))
    begin_sync(fd, start, at - start)
    return digests


def begin_sync(fd: int, start: int, length: int) -> None:
    """Let the disk begin to write a range of a file (Linux' ``sync_file_range``; elsewhere ``fsync`` writes all)."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    write = 2  # SYNC_FILE_RANGE_WRITE
    if call is not None:
        call(fd, ctypes.c_int64(start), ctypes.c_int64(length), write)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which must outlive the view."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")


def chunked(parts: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The bytes of all parts in chunks of ``size``, each a list of views."""
    chunk: list[memoryview] = []
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


def digest(chunk: Sequence[memoryview]) -> str:
    """The SHA-256 of consecutive views, in hex."""
    found = hashlib.sha256()
    for view in chunk:
        found.update(view)
    return found.hexdigest()


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when it is complete and synced to disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_all(fd: int, views: list[memoryview], at: int) -> None:
    """Write consecutive views to a file from byte ``at`` on, in as many calls as it takes."""
    while views:
        done = os.pwritev(fd, views[:1000], at)
        at += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
