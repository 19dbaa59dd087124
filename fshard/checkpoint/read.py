"""Reading: from the pieces that are wanted to the chunks that hold them, verified before anything is copied from them.

A rank reads the chunks, of 1 MiB, that hold a byte that it wants, each once. They are read into memory of this process
and hashed there: a file that is cut short or changed meanwhile is an error, where a mapped file would be a signal.
"""

import bisect
import hashlib
import os
import queue
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fshard.checkpoint.manifest import Extent, FileInfo, Manifest
from fshard.checkpoint.problems import damaged
from fshard.checkpoint.ranges import shared, transfer
from fshard.sharding.layout import Piece

BLOCK = 1 << 21
"""Bytes that a thread reads at once."""


@dataclass(frozen=True, eq=False)
class Want:
    """A piece of a checkpoint's tensor, and the 1-D tensor, of any dtype and device, that is to hold it."""

    name: str
    piece: Piece
    tensor: Tensor


@dataclass(frozen=True)
class Use:
    """The bytes ``begin`` to ``end`` of a file, which lie in an extent and hold what is wanted."""

    begin: int
    end: int
    extent: Extent
    dtype: torch.dtype
    want: Want


@dataclass(frozen=True)
class Job:
    """Whole chunks of a file that one thread reads at once, and what is wanted of them."""

    file: str
    begin: int
    end: int
    uses: list[Use] = field(default_factory=list)


def read_into(folder: str, manifest: Manifest, wants: Sequence[Want]) -> int:
    """Fill the tensors of all wants from a checkpoint, verifying every byte that is read. Returns the bytes read.

    Args:
        folder: of the checkpoint.
        manifest: what is in it. Every name must be in it, every piece within its tensor.
        wants: what to read.

    Raises:
        DamagedError: a file is missing, of another size or kind, or its bytes are not those that were written.
        OSError: the file system's own.
    """
    jobs = plan_reads(manifest, wants)
    perform(folder, manifest.files, jobs)
    return sum(job.end - job.begin for job in jobs)


def verify_files(folder: str, manifest: Manifest) -> int:
    """Read every byte of every file, and compare it with the manifest. Returns the bytes read.

    Raises:
        DamagedError: as ``read_into``.
        OSError: the file system's own.
    """
    jobs = [job for name, info in manifest.files.items() for job in _cut(name, info, [(0, info.size)])]
    perform(folder, manifest.files, jobs)
    return sum(job.end - job.begin for job in jobs)


def plan_reads(manifest: Manifest, wants: Sequence[Want]) -> list[Job]:
    """What to read for these wants: each chunk at most once, files in order."""
    uses: dict[str, list[Use]] = {}
    for want in wants:
        info = manifest.tensors[want.name]
        size = info.dtype.itemsize
        for extent in info.extents:
            found = shared(extent.piece, want.piece) if want.piece.numel else None
            if found is not None:
                begin, end = (extent.at + (n - extent.piece.start) * size for n in found)
                uses.setdefault(extent.file, []).append(Use(begin, end, extent, info.dtype, want))
    jobs = []
    for name in sorted(uses):
        here = list(_cut(name, manifest.files[name], [(use.begin, use.end) for use in uses[name]]))
        begins = [job.begin for job in here]
        for use in uses[name]:
            at = bisect.bisect_right(begins, use.begin) - 1
            while at < len(here) and here[at].begin < use.end:
                here[at].uses.append(use)
                at += 1
        jobs += here
    return jobs


def _cut(name: str, info: FileInfo, spans: Sequence[tuple[int, int]]) -> Iterator[Job]:
    """Jobs for the whole chunks that hold these bytes."""
    most, end = max(1, BLOCK // info.chunk) * info.chunk, 0
    for low, high in sorted(spans):
        begin = max(end, low // info.chunk * info.chunk)
        last = min(info.size, -(-high // info.chunk) * info.chunk)
        while begin < last:
            end = min(begin + most, last)
            yield Job(name, begin, end)
            begin = end


def perform(folder: str, files: Mapping[str, FileInfo], jobs: Sequence[Job]) -> None:
    """Read, verify and copy, by a few threads; each has a buffer of its own."""
    workers = max(1, min(4, len(os.sched_getaffinity(0)), len(jobs)))
    largest = max((job.end - job.begin for job in jobs), default=0)
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(workers):
        buffers.put(bytearray(largest))
    with ExitStack() as stack:
        at = stack.enter_context(directory(folder))
        opened: dict[str, int] = {}
        for name in dict.fromkeys(job.file for job in jobs):
            opened[name] = stack.enter_context(plain_file(folder, name, at, files[name].size))

        def one(job: Job) -> None:
            buffer = buffers.get()
            try:
                _perform(os.path.join(folder, job.file), opened[job.file], files[job.file], job, buffer)
            finally:
                buffers.put(buffer)

        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="fshard-read"))
        try:
            for _ in pool.map(one, jobs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _perform(path: str, fd: int, info: FileInfo, job: Job, buffer: bytearray) -> None:
    """One job: nothing is copied before all of its chunks are verified."""
    length = job.end - job.begin
    view = memoryview(buffer)[:length]
    if read_all(fd, view, job.begin) < length:
        raise damaged(path, [f"it ends before byte {job.end} of its {info.size} bytes"])
    for begin in range(0, length, info.chunk):
        number = (job.begin + begin) // info.chunk
        found = hashlib.sha256(view[begin : begin + info.chunk]).hexdigest()
        if found != info.chunks[number]:
            where = f"bytes {job.begin + begin} to {min(job.begin + begin + info.chunk, info.size)}"
            raise damaged(path, [f"{where} have the SHA-256 {found}, and the manifest says {info.chunks[number]}"])
    for use in job.uses:
        begin, end = max(use.begin, job.begin), min(use.end, job.end)
        size, piece = use.dtype.itemsize, use.extent.piece
        source = torch.frombuffer(buffer, dtype=use.dtype, count=(end - begin) // size, offset=begin - job.begin)
        first = piece.start + (begin - use.extent.at) // size
        transfer(use.want.tensor, use.want.piece, source, replace(piece, start=first, stop=first + len(source)))


class directory:  # noqa: N801 - reads as ``open`` does
    """An open folder, for the files in it; a symbolic link is refused.

    Raises:
        OSError: the file system's own.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> int:
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self.fd

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


class plain_file:  # noqa: N801 - reads as ``open`` does
    """An open file of a folder, which must be a plain file of a known size: no link, pipe or device.

    Raises:
        DamagedError: it is something else.
    """

    def __init__(self, folder: str, name: str, at: int, size: int | None) -> None:
        self.path, self.name, self.at, self.size = os.path.join(folder, name), name, at, size

    def __enter__(self) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.fd = os.open(self.name, flags, dir_fd=self.at)
        except FileNotFoundError:
            raise damaged(self.path, ["it is missing"]) from None
        except OSError as error:
            if os.path.islink(self.path):
                raise damaged(self.path, ["it is a symbolic link, which a checkpoint never holds"]) from None
            error.filename = self.path  # not as it is called from its folder
            raise
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode) or (self.size is not None and status.st_size != self.size):
            os.close(self.fd)
            kind = "a plain file" if stat.S_ISREG(status.st_mode) else "no plain file"
            of = "" if self.size is None else f", and the manifest says {self.size}"
            raise damaged(self.path, [f"it is {kind} of {status.st_size} bytes{of}"])
        return self.fd

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


def read_all(fd: int, view: memoryview, at: int) -> int:
    """Fill a view from byte ``at`` of a file; returns how many bytes there were."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], at + done)
        if not count:
            break
        done += count
    return done
