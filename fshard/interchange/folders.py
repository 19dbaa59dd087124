"""Folders of safetensors files, as Hugging Face keeps models: one file, or several with an index.

Files are written tensor by tensor: their headers are known from shapes and dtypes alone.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fshard.checkpoint import tensorfile
from fshard.checkpoint.files import File, file_errors, folder_at, is_plain_name, plain_file
from fshard.checkpoint.problems import listed, printable, unusable
from fshard.checkpoint.ranges import Block
from fshard.checkpoint.strict_json import parse_json
from fshard.checkpoint.tensorfile import write_header
from fshard.errors import CheckpointError, DamagedError, PlanError, lines
from fshard.interchange.boxes import read_box
from fshard.interchange.source import Stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Folder:
    """A source of safetensors files: what is not asked for is not read.

    Args:
        path: a ``.safetensors`` file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there is no such file, or it is not what it should be; ``DamagedError`` if it is not whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(path)
        self._headers: dict[Path, dict[str, tensorfile.Stored]] = {}
        self._sizes: dict[Path, int] = {}
        self.files, self.tensors = self._scan(Path(path))

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Read the blocks from the file."""
        file = self.files[name]
        stored = self._headers[file][name]
        with _opened(file, self._sizes[file]) as handle:
            for block, out in parts:
                read_box(handle, stored.begin, stored.shape, block.offset, out, stored.dtype)

    def check_dense(self) -> None:
        """Refuse files that are nearly all holes, before memory is taken for all that they claim.

        Raises:
            DamagedError: one is.
        """
        for file, size in self._sizes.items():
            with _opened(file, size) as handle:
                handle.check_dense()

    def _scan(self, path: Path) -> tuple[dict[str, Path], dict[str, Stored]]:
        """The file of each tensor, and what is known of it."""
        if not path.is_dir() and path.name != INDEX and os.path.lexists(path):
            weights = None
            files = [path]
        else:
            folder = path if path.name != INDEX else path.parent
            weights = None if path.name != INDEX and os.path.lexists(folder / SINGLE) else _index(folder)
            files = (
                [folder / SINGLE] if weights is None else [folder / name for name in dict.fromkeys(weights.values())]
            )
        where: dict[str, Path] = {}
        stored: dict[str, Stored] = {}
        for file in files:
            self._headers[file], self._sizes[file] = _header(file)
            for name, what in self._headers[file].items():
                if name in where:
                    twice = f"{printable(name)} is in {where[name]} and in {file}"
                    raise DamagedError(f"{twice}: remove the one that does not belong")
                where[name], stored[name] = file, Stored(what.shape, what.dtype)
        if weights is not None:
            _check_index(path, weights, {name: file.name for name, file in where.items()})
        return where, stored


class Writer:
    """One safetensors file that is written tensor by tensor, under a temporary name until all of it is there.

    Args:
        path: where it will be.
        tensors: shapes and dtypes by name, in the order in which tensors will come.
        metadata: strings by name, kept in the header.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._left = list(tensors)
        header = write_header({name: (stored.dtype, stored.shape) for name, stored in tensors.items()}, metadata)
        self._file: BinaryIO = open(self.partial, "wb")
        self._file.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        assert name == self._left.pop(0), "tensors come in the order of the header"
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        # The bytes in place; a numpy array would do as well, but numpy may be missing.
        self._file.write((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()) if flat.numel() else b"")

    def close(self) -> None:
        """Sync the whole file."""
        assert not self._left, "a tensor of the header did not come"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        """Give the file its name."""
        self.partial.replace(self.path)

    def discard(self) -> None:
        """Remove what was written."""
        self._file.close()
        self.partial.unlink(missing_ok=True)


def fill_files(tensors: Mapping[str, Stored], limit: int) -> list[dict[str, Stored]]:
    """Tensors to files in their order, each file of at most ``limit`` bytes or of one tensor."""
    files: list[dict[str, Stored]] = []
    room = -1
    for name, stored in tensors.items():
        size = torch.Size(stored.shape).numel() * stored.dtype.itemsize
        if not files or size > room:
            files.append({})
            room = limit
        files[-1][name] = stored
        room -= size
    return files


def numbered(count: int) -> list[str]:
    """The names of so many files of one model."""
    return [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]


def write_json(path: Path, value: Any) -> None:
    """A JSON file, complete or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    partial.replace(path)


def stale(folder: Path) -> list[Path]:
    """Weights that lie in a folder already, which a reader could take for those that are to be written."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "pytorch_model*.bin*")
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


@contextmanager
def _opened(path: Path, size: int | None = None) -> Iterator[File]:
    """An open file, for reading. Links are followed: the Hub's cache consists of them."""
    folder = str(path.parent)
    with (
        file_errors("read", str(path)),
        folder_at(folder, links=True) as at,
        plain_file(folder, path.name, at, size, links=True, refuse=_broken) as file,
    ):
        yield file


def _broken(path: str, problems: Iterable[str]) -> CheckpointError:
    reasons = "; ".join(listed(list(problems)))
    return DamagedError(f"{path} is not a whole safetensors file: {reasons}. Fetch or write it again.")


def _header(path: Path) -> tuple[dict[str, tensorfile.Stored], int]:
    """The tensors of a file, and its size."""
    with _opened(path) as file:
        start = bytes(file.read(0, min(4, file.size)))
        if start == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
            raise _pickle(path)
        return tensorfile.header_of(file)[0], file.size


def _pickle(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a pickle, as torch.save writes it, which can run code when it is loaded: fshard reads none. "
        f"Where you trust it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    )


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    path = folder / INDEX
    if not os.path.lexists(path):
        raise _nothing_here(folder)
    with (
        file_errors("read", str(path)),
        folder_at(str(folder), links=True) as at,
        plain_file(str(folder), INDEX, at, links=True, refuse=unusable) as file,
    ):
        if file.size > tensorfile.LIMIT:
            raise DamagedError(f"{path} is no index: it has {file.size} bytes, of at most {tensorfile.LIMIT}")
        text = file.text(0, file.size)
    try:
        weights = parse_json(text, tensorfile.SPACE)["weight_map"]
        strings = all(isinstance(k, str) and isinstance(v, str) for k, v in weights.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is no index: {type(error).__name__}: {printable(str(error))}") from error
    if not strings or not weights:
        raise DamagedError(f"{path} is no index: weight_map gives the name of a file for each tensor")
    names = dict.fromkeys(weights.values())
    outside = sorted(name for name in names if not is_plain_name(name) or not name.endswith(".safetensors"))
    if outside:
        remedy = "Only safetensors files beside the index are read."
        raise DamagedError(lines(f"{path} names files that it may not:", listed(outside), remedy))
    gone = sorted(name for name in names if not os.path.exists(folder / name))
    if gone:
        raise DamagedError(lines(f"{path} names files that are not there:", listed(gone), "Fetch or write them again."))
    return dict(weights)


def _check_index(path: Path, weights: Mapping[str, str], held: Mapping[str, str]) -> None:
    wrong = [
        f"{name}: the index says {file}, which does not hold it" for name, file in weights.items() if name not in held
    ]
    wrong += [
        f"{name}: the index says {weights.get(name, 'nothing')}, and it is in {file}"
        for name, file in held.items()
        if weights.get(name) != file
    ]
    if wrong:
        raise DamagedError(
            lines(f"the index of {path} is not that of its files:", listed(wrong), "Write the index again.")
        )


def _nothing_here(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(
            f"{folder} does not exist: give a folder or a .safetensors file; huggingface_hub.snapshot_download(name) "
            f"fetches a model of the Hub and returns its folder"
        )
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    also = f" It holds {', '.join(pickles)}: pickles, which can run code, are not read." if pickles else ""
    return CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.{also} Save the model as safetensors.")


def size_in_bytes(size: int | str) -> int:
    """A size such as ``5000000``, ``"5GB"`` or ``"512MiB"``.

    >>> size_in_bytes("2KB"), size_in_bytes("2KiB")
    (2000, 2048)

    Raises:
        PlanError: it is no size.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    for unit, factor in units.items():
        if isinstance(size, str) and size.endswith(unit) and size.removesuffix(unit).strip().isdigit():
            count = int(size.removesuffix(unit)) * factor
            if count:
                return count
    raise PlanError(f"max_shard_size={size!r}: give bytes, or a number with a unit of {', '.join(units)}")
