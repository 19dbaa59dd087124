"""Folders of safetensors files, as Hugging Face keeps models: one file, or several with an index.

Files are written tensor by tensor: their headers are known from shapes and dtypes alone.
"""

import ctypes
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fshard.checkpoint import tensorfile
from fshard.checkpoint.problems import unreachable
from fshard.checkpoint.ranges import Block
from fshard.checkpoint.tensorfile import parse_json, write_header
from fshard.errors import CheckpointError, DamagedError, PlanError, lines
from fshard.interchange.source import Stored, index_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Folder:
    """A source of safetensors files, mapped into memory: what is not asked for is not read.

    Args:
        path: a ``.safetensors`` file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there is no such file, or it is not what it should be; ``DamagedError`` if it is not whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(path)
        self._headers: dict[Path, dict[str, tensorfile.Stored]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.files, self.tensors = self._scan(Path(path))

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Copy the blocks out of the file's map."""
        file = self.files[name]
        stored = self._headers[file][name]
        if file not in self._maps:
            with open(file, "rb") as handle:  # the map of a read-only file, which torch may think it can write to
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        count = (stored.end - stored.begin) // stored.dtype.itemsize
        whole = torch.frombuffer(self._maps[file], dtype=stored.dtype, count=count, offset=stored.begin)
        for block, out in parts:
            out.copy_(whole.view(stored.shape)[index_of(block)])

    def _scan(self, path: Path) -> tuple[dict[str, Path], dict[str, Stored]]:
        """The file of each tensor, and what is known of it."""
        if path.is_file() and path.name != INDEX:
            listed = None
            files = [path]
        else:
            folder = path if path.name != INDEX else path.parent
            listed = None if path.name != INDEX and (folder / SINGLE).is_file() else _index(folder)
            files = [folder / SINGLE] if listed is None else [folder / name for name in dict.fromkeys(listed.values())]
        where: dict[str, Path] = {}
        stored: dict[str, Stored] = {}
        for file in files:
            self._headers[file] = _header(file)
            for name, what in self._headers[file].items():
                if name in where:
                    raise DamagedError(f"{name} is in {where[name]} and in {file}: remove the one that does not belong")
                where[name], stored[name] = file, Stored(what.shape, what.dtype)
        if listed is not None:
            _check_index(path, listed, {name: file.name for name, file in where.items()})
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


def _header(file: Path) -> dict[str, tensorfile.Stored]:
    try:
        with open(file, "rb") as handle:
            size, start = os.fstat(handle.fileno()).st_size, handle.read(8)
            if start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
                raise _pickle(file)
            rest = handle.read(tensorfile.header_length(str(file), start, size) - 8)
        return tensorfile.read_header(str(file), start + rest, size)[0]
    except OSError as error:
        raise unreachable(str(file), "read", error) from error
    except DamagedError as error:
        reason = str(error).rpartition("\n")[0].partition("\n")[2].strip()
        raise DamagedError(f"{file} is not a whole safetensors file: {reason}. Fetch or write it again.") from error


def _pickle(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a pickle, as torch.save writes it, which can run code when it is loaded: fshard reads none. "
        f"Where you trust it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    )


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    file = folder / INDEX
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise _nothing_here(folder) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        listed = parse_json(text.encode())["weight_map"]
        strings = all(isinstance(k, str) and isinstance(v, str) for k, v in listed.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is no index: {type(error).__name__}: {error}") from error
    if not strings or not listed:
        raise DamagedError(f"{file} is no index: weight_map gives the name of a file for each tensor")
    outside = sorted({name for name in listed.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if outside:
        remedy = "Only safetensors files beside the index are read."
        raise DamagedError(lines(f"{file} names files that it may not:", outside, remedy))
    gone = sorted({name for name in listed.values() if not (folder / name).is_file()})
    if gone:
        raise DamagedError(lines(f"{file} names files that are not there:", gone, "Fetch or write them again."))
    return dict(listed)


def _check_index(path: Path, listed: Mapping[str, str], held: Mapping[str, str]) -> None:
    wrong = [
        f"{name}: the index says {file}, which does not hold it" for name, file in listed.items() if name not in held
    ]
    wrong += [
        f"{name}: the index says {listed.get(name, 'nothing')}, and it is in {file}"
        for name, file in held.items()
        if listed.get(name) != file
    ]
    if wrong:
        raise DamagedError(lines(f"the index of {path} is not that of its files:", wrong, "Write the index again."))


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
