"""Verifying a checkpoint without restoring it: every byte of it, and that its parts say the same."""

import os
from collections.abc import Iterator

from fshard.checkpoint.folder import MANIFEST, read_manifest, telling
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.problems import damaged
from fshard.checkpoint.read import directory, plain_file, read_all, verify_files
from fshard.checkpoint.tensorfile import Stored, header_length, read_header


def verify_step(folder: str) -> Manifest:
    """Verify a step's folder: the manifest, the SHA-256 of every chunk, each file's header, and what else lies there.

    Raises:
        CheckpointError: it cannot be read.
        DamagedError: something in it is not as it was written.
    """
    manifest = read_manifest(folder)
    with telling("read", folder):
        verify_files(folder, manifest)
        problems = [problem for name in manifest.files for problem in _header(folder, name, manifest)]
        unknown = sorted(set(os.listdir(folder)) - {MANIFEST, *manifest.files})
    problems += [f"{name[:100]!r} is not in the manifest" for name in unknown]
    if problems:
        raise damaged(folder, problems)
    return manifest


def header_of(folder: str, name: str, size: int | None = None) -> tuple[dict[str, Stored], dict[str, str]]:
    """The header of a safetensors file: its tensors by name, and its metadata. Data are not read.

    Args:
        folder: where it lies.
        name: what it is called there; a symbolic link is refused.
        size: its bytes, if they are known.

    Raises:
        DamagedError: it is no such file.
        OSError: the file system's own.
    """
    path = os.path.join(folder, name)
    with directory(folder) as at, plain_file(folder, name, at, size) as fd:
        total = os.fstat(fd).st_size
        start = bytearray(8)
        length = header_length(path, bytes(start[: read_all(fd, memoryview(start), 0)]), total)
        text = bytearray(length)
        if read_all(fd, memoryview(text), 0) < length:
            raise damaged(path, [f"its header ends before byte {length}"])
        return read_header(path, bytes(text), total)


def _header(folder: str, name: str, manifest: Manifest) -> Iterator[str]:
    """Where a file's header and the manifest differ."""
    tensors, _ = header_of(folder, name, manifest.files[name].size)
    listed = {
        key: Stored(info.dtype, (extent.piece.numel,), extent.at, extent.at + extent.piece.numel * info.dtype.itemsize)
        for key, info in manifest.tensors.items()
        for extent in info.extents
        if extent.file == name
    }
    for key in dict.fromkeys([*tensors, *listed]):
        if tensors.get(key) != listed.get(key):
            yield f"{name}: {key[:200]} is {tensors.get(key)} in its header and {listed.get(key)} in the manifest"
