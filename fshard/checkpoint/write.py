"""What one rank writes: which slices are its own, and the files that hold them, hashed as they are written."""

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fshard.checkpoint.manifest import CHUNK, Extent, FileInfo, TensorInfo
from fshard.checkpoint.tensorfile import write_header
from fshard.sharding.layout import ALIGN, Piece
from fshard.sharding.spec import Shape
from fshard.state.entries import Entry

SPLIT = 1 << 14
"""Bytes of a replicated piece below which one of its holders writes it whole."""
FILE_BYTES = 1 << 29
"""Bytes of data in a file, about: on a device that is not the CPU, they are in host memory while they are written."""
BATCH = 8
"""Chunks that a thread hashes and writes in turn."""


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
        """The elements ``begin`` to ``end`` of it."""
        piece = replace(self.piece, start=self.piece.start + begin, stop=self.piece.start + end)
        return Slice(self.name, piece, self.data[begin:end])


def owned(entries: Sequence[Entry], rank: int) -> list[Slice]:
    """What a rank writes of its entries: every element of every tensor is written by one rank.

    A large piece that several ranks hold is cut into as many ranges; a small one is written by the rank among them that
    has least to write. All of them find the same answer alone, from sizes.
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


def described(entries: Sequence[Entry]) -> dict[str, TensorInfo]:
    """The tensors of a state, without extents."""
    return {entry.name: TensorInfo(entry.dtype, entry.shape, repr(entry.spec), ()) for entry in entries}


def packed(slices: Sequence[Slice], limit: int = FILE_BYTES) -> Iterator[list[Slice]]:
    """Slices as the contents of files of at most ``limit`` bytes of data, large ones cut."""
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
    """Write a rank's slices to files of their own, each synced to disk before the next.

    Args:
        folder: where to; it must exist.
        rank: in the names of the files.
        slices: on any device, contiguous.
        limit: bytes of data in a file, about.

    Raises:
        OSError: the file system's own.
    """
    written = Written({}, {})
    with ThreadPoolExecutor(max_workers=hashers() + 1, thread_name_prefix="fshard-write") as pool:
        for number, part in enumerate(packed(slices, limit)):
            name = f"rank-{rank:05d}-{number:03d}.safetensors"
            write_file(folder, name, part, pool, written)
    return written


@dataclass(frozen=True)
class Written:
    """Files that were written, and the extents in them by the tensor's name."""

    files: dict[str, FileInfo]
    extents: dict[str, list[Extent]]


def hashers() -> int:
    """Threads that hash, beside one more."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def write_file(folder: str, name: str, slices: Sequence[Slice], pool: ThreadPoolExecutor, written: Written) -> None:
    """Write one file, and add what it holds to ``written``. Threads hash a chunk and write it, still in the cache."""
    # Larger elements first, so that each begins at a multiple of its size. On the CPU nothing is copied.
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
        for task in tasks:  # after an error: nothing may read the tensors, or use the file, when this has returned
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
    """Hash chunks, and write each to its place in a file; returns the hashes."""
    digests, at = [], start
    for chunk in chunks:
        digests.append(digest(chunk))
        write_all(fd, list(chunk), at)
        at += sum(map(len, chunk))
    begin_sync(fd, start, at - start)
    return digests


def begin_sync(fd: int, start: int, length: int) -> None:
    """Let the disk begin with a range of a file, without waiting for it: the system would, only when it must.

    Linux' ``sync_file_range``; elsewhere, and where a file system does not know it, all is left to ``fsync``.
    """
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
    """The same bytes in chunks of ``size``, each a list of views."""
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
    """The SHA-256 of views one behind the other, in hex."""
    found = hashlib.sha256()
    for view in chunk:
        found.update(view)
    return found.hexdigest()


def write_all(fd: int, views: list[memoryview], at: int) -> None:
    """Write views one behind the other from a byte of a file on, in as many calls as it takes."""
    while views:
        done = os.pwritev(fd, views[:1000], at)
        at += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
