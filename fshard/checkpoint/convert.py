"""A checkpoint in another form: one safetensors file, or cut for another number of ranks; by one process.

It holds one tensor, or the data of one file, in memory, whatever the size of the checkpoint.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fshard.checkpoint.files import file_errors
from fshard.checkpoint.folder import CheckpointFolder, discard, sync
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.read import Target, check_files, read_into
from fshard.checkpoint.save import complete, written_row
from fshard.checkpoint.tensorfile import write_header
from fshard.checkpoint.write import FILE_BYTES, Slice, Written, hashers, packed, raw, write_all, write_file
from fshard.errors import CheckpointError
from fshard.sharding.layout import ALIGN, Piece


def whole_piece(shape: tuple[int, ...]) -> Piece:
    """The piece that is all of a tensor."""
    return Piece((0,) * len(shape), shape, 0, torch.Size(shape).numel())


def load_tensor(folder: str, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor of a checkpoint, verified, on the CPU.

    Raises:
        DamagedError: its bytes differ from those that were written.
        CheckpointError: it cannot be read.
    """
    info = manifest.tensors[name]
    with file_errors("read", folder):
        check_files(folder, manifest.files, {extent.file for extent in info.extents})
        flat = torch.empty(torch.Size(info.shape).numel(), dtype=info.dtype)
        read_into(folder, manifest, [Target(name, whole_piece(info.shape), flat)])
    return flat.view(info.shape)


def to_file(folder: str, manifest: Manifest, path: str, names: Mapping[str, str]) -> int:
    """Write whole tensors to a new safetensors file, which exists completely or not at all. Returns its bytes.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        path: the file.
        names: the name in the file of each tensor to write.

    Raises:
        CheckpointError: the file exists, or cannot be written.
        DamagedError: the checkpoint differs from what was written.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: give another name, or remove it")
    tensors = sorted(names, key=lambda name: -manifest.tensors[name].dtype.itemsize)
    header = write_header(
        {names[n]: (manifest.tensors[n].dtype, manifest.tensors[n].shape) for n in tensors},
        {"format": "pt", "step": str(manifest.step)},
    )
    temporary = f"{path}.tmp-{secrets.token_hex(4)}"
    try:
        with file_errors("write to", temporary), open(temporary, "xb") as file:
            file.write(header)
            file.flush()
            at = len(header)
            for name in tensors:
                tensor = load_tensor(folder, manifest, name).view(-1)
                write_all(file.fileno(), [raw(tensor)], at)
                at += tensor.nbytes
            os.fsync(file.fileno())
        with file_errors("write to", path):
            os.link(temporary, path)  # unlike a rename, a link never replaces a file
            sync(os.path.dirname(os.path.abspath(path)))
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return at


def to_folder(folder: str, manifest: Manifest, root: str, ranks: int, limit: int = FILE_BYTES) -> None:
    """Write the step to another folder of checkpoints, cut into equal ranges for a number of ranks.

    Any number of ranks can read any checkpoint; one file for each rank is read fastest.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        root: the folder of checkpoints to write to.
        ranks: the number of ranks.
        limit: bytes of data in a file, about.

    Raises:
        CheckpointError: the step exists, or cannot be written.
        DamagedError: the checkpoint differs from what was written.
    """
    target = CheckpointFolder(root)
    path = target.begin(manifest.step, overwrite=False)
    try:
        with ThreadPoolExecutor(max_workers=hashers() + 1) as pool:
            rows = [written_row(_write_rank(folder, manifest, path, rank, ranks, limit, pool)) for rank in range(ranks)]
        tensors = {n: replace(info, spec="P(flat='ranks')", extents=()) for n, info in manifest.tensors.items()}
        head = replace(manifest, files={}, mesh={"ranks": ranks}, tensors=tensors)
        target.commit(path, manifest.step, complete(head, rows).dump())
    except BaseException:
        discard(path)
        raise
    finally:
        target.close()


def _write_rank(
    folder: str, manifest: Manifest, path: str, rank: int, ranks: int, limit: int, pool: ThreadPoolExecutor
) -> Written:
    """The files of one rank."""
    written = Written({}, {})
    for number, part in enumerate(packed(list(_ranges(manifest, rank, ranks)), limit)):
        filled = [replace(s, data=torch.empty_like(s.data, device="cpu")) for s in part]
        with file_errors("read", folder):
            read_into(folder, manifest, [Target(s.name, s.piece, s.data) for s in filled])
        with file_errors("write to", path):
            write_file(path, f"rank-{rank:05d}-{number:03d}.safetensors", filled, pool, written)
    return written


def _ranges(manifest: Manifest, rank: int, ranks: int) -> Iterator[Slice]:
    """A rank's range of each tensor, without data."""
    for name, info in manifest.tensors.items():
        piece = whole_piece(info.shape)
        step = -(-piece.numel // ranks // ALIGN) * ALIGN
        begin, end = min(piece.numel, rank * step), min(piece.numel, (rank + 1) * step)
        if begin < end:
            empty = torch.empty(end - begin, dtype=info.dtype, device="meta")
            yield Slice(name, replace(piece, start=begin, stop=end), empty)
