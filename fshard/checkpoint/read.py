"""Reading: from the pieces that are wanted to the chunks that hold them, verified before anything is copied from them.

A rank reads the chunks, of 1 MiB, that hold a byte that it wants, each once. They are read into memory of this process
and hashed there: a file that is cut short or changed meanwhile is an error, where a mapped file would be a signal.
"""

import bisect
import hashlib
import os
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fshard.checkpoint.files import File, folder_at, plain_file
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


def check_files(folder: str, files: Mapping[str, FileInfo], names: Iterable[str]) -> None:
    """See that files are there and as large as the manifest says, before memory is taken for what they hold.

    Raises:
        DamagedError: one is missing, of another size or kind, or nearly all holes.
        OSError: the file system's own.
    """
    with folder_at(folder) as at:
        for name in names:
            with plain_file(folder, name, at, files[name].size) as file:
                file.check_dense()


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
    with ExitStack() as stack:
        at = stack.enter_context(folder_at(folder))
        opened: dict[str, File] = {}
        for name in dict.fromkeys(job.file for job in jobs):
            opened[name] = stack.enter_context(plain_file(folder, name, at, files[name].size))
        for _ in range(workers):  # now that files are as large as the manifest says
            buffers.put(bytearray(largest))

        def one(job: Job) -> None:
            buffer = buffers.get()
            try:
                _perform(opened[job.file], files[job.file], job, buffer)
            finally:
                buffers.put(buffer)

        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="fshard-read"))
        try:
            for _ in pool.map(one, jobs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _perform(file: File, info: FileInfo, job: Job, buffer: bytearray) -> None:
    """One job: nothing is copied before all of its chunks are verified."""
    length = job.end - job.begin
    view = memoryview(buffer)[:length]
    file.fill(view, job.begin)
    for begin in range(0, length, info.chunk):
        number = (job.begin + begin) // info.chunk
        found = hashlib.sha256(view[begin : begin + info.chunk]).hexdigest()
        if found != info.chunks[number]:
            where = f"bytes {job.begin + begin} to {min(job.begin + begin + info.chunk, info.size)}"
            raise damaged(file.path, [f"{where} have the SHA-256 {found}, and the manifest says {info.chunks[number]}"])
    for use in job.uses:
        begin, end = max(use.begin, job.begin), min(use.end, job.end)
        size, piece = use.dtype.itemsize, use.extent.piece
        source = torch.frombuffer(buffer, dtype=use.dtype, count=(end - begin) // size, offset=begin - job.begin)
        first = piece.start + (begin - use.extent.at) // size
        transfer(use.want.tensor, use.want.piece, source, replace(piece, start=first, stop=first + len(source)))
