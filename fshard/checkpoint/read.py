"""Reading and verifying: from the pieces that are needed to the chunks that hold them, hashed before any is copied.

A rank reads each chunk, of 1 MiB, that holds a byte that it needs, once. Chunks are read into this process' own memory
and hashed there, so a file that is cut short or changed meanwhile raises an error.
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

from fshard.checkpoint.folder import MANIFEST, read_manifest
from fshard.checkpoint.manifest import Extent, FileInfo, Manifest
from fshard.checkpoint.ranges import Slice, copy_shared, shared_range
from fshard.checkpoint.tensorfile import Stored, read_header
from fshard.reading.files import File, damaged, file_errors, folder_at, open_file, plain_file

BLOCK = 1 << 21
"""Bytes that a thread reads at a time."""


@dataclass(frozen=True)
class FileSpan:
    """The bytes ``begin`` to ``end`` of a file, which lie in an extent and hold a part of a target."""

    begin: int
    end: int
    extent: Extent
    dtype: torch.dtype
    target: Slice


@dataclass(frozen=True)
class ReadJob:
    """Whole chunks of a file that one thread reads at a time, and the spans that they hold."""

    file: str
    begin: int
    end: int
    spans: list[FileSpan] = field(default_factory=list)


def read_into(folder: str, manifest: Manifest, targets: Sequence[Slice]) -> None:
    """Fill the tensors of all targets from a checkpoint, and verify every byte that is read.

    Raises:
        DamagedError: a file is missing, of another size or kind, or its bytes differ from those that were written.
        OSError: any other error of the file system.
    """
    _perform(folder, manifest.files, plan_reads(manifest, targets))
    for target in targets:
        if target.onto is not None:
            target.onto.add_(target.data)


def check_files(folder: str, files: Mapping[str, FileInfo], names: Iterable[str]) -> None:
    """Check that files have the sizes of the manifest and few holes, before memory is allocated for their contents."""
    with folder_at(folder) as at:
        for name in names:
            with plain_file(folder, name, at, files[name].size) as file:
                file.check_dense()


def verify_step(folder: str) -> Manifest:
    """Verify a step's folder: the manifest, every chunk's SHA-256, each file's header, and that nothing else is there.

    Raises:
        DamagedError: something in it differs from what was written.
    """
    manifest = read_manifest(folder)
    with file_errors("read", folder):
        jobs = [job for name, info in manifest.files.items() for job in _cut(name, info, [(0, info.size)])]
        _perform(folder, manifest.files, jobs)
        problems = [problem for name in manifest.files for problem in _header_problems(folder, name, manifest)]
        unknown = sorted(set(os.listdir(folder)) - {MANIFEST, *manifest.files})
    problems += [f"{name[:100]!r} is not in the manifest" for name in unknown]
    if problems:
        raise damaged(folder, problems)
    return manifest


def _header_problems(folder: str, name: str, manifest: Manifest) -> Iterator[str]:
    """Say where a file's header and the manifest differ."""
    with open_file(folder, name, manifest.files[name].size) as file:
        tensors = read_header(file)
    listed = {
        key: Stored((extent.piece.numel,), info.dtype, extent.at)
        for key, info in manifest.tensors.items()
        for extent in info.extents
        if extent.file == name
    }
    for key in dict.fromkeys([*tensors, *listed]):
        if tensors.get(key) != listed.get(key):
            yield f"{name}: {key[:200]} is {tensors.get(key)} in its header and {listed.get(key)} in the manifest"


def plan_reads(manifest: Manifest, targets: Sequence[Slice]) -> list[ReadJob]:
    """Return what to read for these targets: each chunk at most once, files in order."""
    spans: dict[str, list[FileSpan]] = {}
    for target in targets:
        info = manifest.tensors[target.name]
        for extent in info.extents:
            found = shared_range(extent.piece, target.piece) if target.piece.numel else None
            if found is not None:
                begin, end = (extent.at + (n - extent.piece.start) * info.dtype.itemsize for n in found)
                spans.setdefault(extent.file, []).append(FileSpan(begin, end, extent, info.dtype, target))
    jobs = []
    for name in sorted(spans):
        here = list(_cut(name, manifest.files[name], [(span.begin, span.end) for span in spans[name]]))
        begins = [job.begin for job in here]
        for span in spans[name]:
            at = bisect.bisect_right(begins, span.begin) - 1
            while at < len(here) and here[at].begin < span.end:
                here[at].spans.append(span)
                at += 1
        jobs += here
    return jobs


def _cut(name: str, info: FileInfo, spans: Sequence[tuple[int, int]]) -> Iterator[ReadJob]:
    """Jobs for the whole chunks that hold these bytes."""
    most, end = max(1, BLOCK // info.chunk) * info.chunk, 0
    for low, high in sorted(spans):
        begin = max(end, low // info.chunk * info.chunk)
        last = min(info.size, -(-high // info.chunk) * info.chunk)
        while begin < last:
            end = min(begin + most, last)
            yield ReadJob(name, begin, end)
            begin = end


def _perform(folder: str, files: Mapping[str, FileInfo], jobs: Sequence[ReadJob]) -> None:
    """Read, verify and copy in a few threads, each with a buffer of its own."""
    workers = max(1, min(4, len(os.sched_getaffinity(0)), len(jobs)))
    largest = max((job.end - job.begin for job in jobs), default=0)
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    with ExitStack() as stack:
        at = stack.enter_context(folder_at(folder))
        opened: dict[str, File] = {}
        for name in dict.fromkeys(job.file for job in jobs):
            opened[name] = stack.enter_context(plain_file(folder, name, at, files[name].size))
        for _ in range(workers):  # allocated now that files are known to have the sizes of the manifest
            buffers.put(bytearray(largest))

        def one(job: ReadJob) -> None:
            buffer = buffers.get()
            try:
                _read_job(opened[job.file], files[job.file], job, buffer)
            finally:
                buffers.put(buffer)

        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="fshard-read"))
        try:
            for _ in pool.map(one, jobs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _read_job(file: File, info: FileInfo, job: ReadJob, buffer: bytearray) -> None:
    """Read one job, verify all of its chunks, then copy."""
    length = job.end - job.begin
    view = memoryview(buffer)[:length]
    file.fill(view, job.begin)
    for begin in range(0, length, info.chunk):
        number = (job.begin + begin) // info.chunk
        found = hashlib.sha256(view[begin : begin + info.chunk]).hexdigest()
        if found != info.chunks[number]:
            where = f"bytes {job.begin + begin} to {min(job.begin + begin + info.chunk, info.size)}"
            raise damaged(file.path, [f"{where} have the SHA-256 {found}, and the manifest says {info.chunks[number]}"])
    for span in job.spans:
        begin, end = max(span.begin, job.begin), min(span.end, job.end)
        size, piece = span.dtype.itemsize, span.extent.piece
        source = torch.frombuffer(buffer, dtype=span.dtype, count=(end - begin) // size, offset=begin - job.begin)
        first = piece.start + (begin - span.extent.at) // size
        copy_shared(span.target.data, span.target.piece, source, replace(piece, start=first, stop=first + len(source)))
