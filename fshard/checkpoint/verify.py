"""Verifying a checkpoint without restoring it: every byte of it, and that its parts say the same."""

import os
from collections.abc import Iterator

from fshard.checkpoint.files import folder_at, plain_file
from fshard.checkpoint.folder import MANIFEST, read_manifest, telling
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.problems import damaged
from fshard.checkpoint.read import verify_files
from fshard.checkpoint.tensorfile import Stored, header_of


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


def _header(folder: str, name: str, manifest: Manifest) -> Iterator[str]:
    """Where a file's header and the manifest differ."""
    with folder_at(folder) as at, plain_file(folder, name, at, manifest.files[name].size) as file:
        tensors, _ = header_of(file)
    listed = {
        key: Stored(info.dtype, (extent.piece.numel,), extent.at, extent.at + extent.piece.numel * info.dtype.itemsize)
        for key, info in manifest.tensors.items()
        for extent in info.extents
        if extent.file == name
    }
    for key in dict.fromkeys([*tensors, *listed]):
        if tensors.get(key) != listed.get(key):
            yield f"{name}: {key[:200]} is {tensors.get(key)} in its header and {listed.get(key)} in the manifest"
