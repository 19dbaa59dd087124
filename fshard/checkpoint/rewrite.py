"""A checkpoint in another form: one safetensors file, or cut for another number of ranks; by one process.

It holds one tensor, or the data of one file, in memory, whatever the size of the checkpoint.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fshard.checkpoint.folder import CheckpointFolder, discard, sync
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.read import check_files, read_into
from fshard.checkpoint.save import complete
from fshard.checkpoint.tensorfile import write_header
from fshard.checkpoint.write import equal_range, packed, raw, synced, write_files
from fshard.errors import CheckpointError
from fshard.reading.files import file_errors
from fshard.sharding.layout import Piece


def whole_piece(shape: tuple[int, ...]) -> Piece:
    """The piece that is all of a tensor."""
    return Piece((0,) * len(shape), shape, 0, torch.Size(shape).numel())


def load_tensor(folder: str, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor of a checkpoint, verified, on the CPU."""
    info = manifest.tensors[name]
    with file_errors("read", folder):
        check_files(folder, manifest.files, {extent.file for extent in info.extents})
        flat = torch.empty(torch.Size(info.shape).numel(), dtype=info.dtype, device="cpu")
        read_into(folder, manifest, [Slice(name, whole_piece(info.shape), flat)])
    return flat.view(info.shape)


def to_file(folder: str, manifest: Manifest, path: str, names: Mapping[str, str]) -> int:
    """Write whole tensors, by their names in the file, to a new safetensors file. Returns its bytes.

    The file exists completely or not at all.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: give another name, or remove it")
    tensors = sorted(names, key=lambda name: -manifest.tensors[name].dtype.itemsize)
    metadata = {"format": "pt", "step": str(manifest.step)}
    temporary = f"{path}.tmp-{secrets.token_hex(4)}"
    try:
        with file_errors("write to", temporary), synced(temporary, "xb") as file:
            file.write(write_header({names[name]: manifest.tensors[name] for name in tensors}, metadata))
            for name in tensors:
                tensor = load_tensor(folder, manifest, name)
                file.write(raw(tensor))
            size = file.tell()
        with file_errors("write to", path):
            os.link(temporary, path)  # unlike a rename, a link never replaces a file
            sync(os.path.dirname(os.path.abspath(path)))
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return size


def to_folder(folder: str, manifest: Manifest, root: str, ranks: int) -> None:
    """Write the step to another folder of checkpoints, cut into equal ranges for a number of ranks.

    Any number of ranks can read any checkpoint; one file for each rank is read fastest.
    """
    target = CheckpointFolder(root)
    path = target.begin(manifest.step, overwrite=False)
    try:
        with file_errors("write to", path):
            rows = [write_files(path, rank, _loaded(folder, manifest, rank, ranks)) for rank in range(ranks)]
        tensors = {n: replace(info, spec="P(flat='ranks')", extents=()) for n, info in manifest.tensors.items()}
        head = replace(manifest, files={}, mesh={"ranks": ranks}, tensors=tensors)
        target.commit(path, manifest.step, complete(head, rows).dump())
    except BaseException:
        discard(path)
        raise
    finally:
        target.close()


def _loaded(folder: str, manifest: Manifest, rank: int, ranks: int) -> Iterator[list[Slice]]:
    """A rank's range of each tensor, file by file."""
    ranges = []
    for name, info in manifest.tensors.items():
        piece = whole_piece(info.shape)
        begin, end = equal_range(piece.numel, rank, ranks)
        if begin < end:
            empty = torch.empty(end - begin, dtype=info.dtype, device="meta")
            ranges.append(Slice(name, replace(piece, start=begin, stop=end), empty))
    for part in packed(ranges):
        filled = [replace(s, data=torch.empty_like(s.data, device="cpu")) for s in part]
        with file_errors("read", folder):
            read_into(folder, manifest, [Slice(s.name, s.piece, s.data) for s in filled])
        yield filled
