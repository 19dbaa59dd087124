"""Files of Hugging Face models: one safetensors file, or several with an index.

Files are written tensor by tensor: shapes and dtypes determine their headers.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from fshard.checkpoint import tensorfile
from fshard.checkpoint.files import File, file_errors, is_plain_name, open_file
from fshard.checkpoint.problems import listed, printable, unusable
from fshard.checkpoint.ranges import Block
from fshard.checkpoint.strict_json import parse_json
from fshard.checkpoint.tensorfile import write_header
from fshard.checkpoint.write import new_file, raw
from fshard.errors import CheckpointError, DamagedError, PlanError, lines
from fshard.interchange.boxes import read_box
from fshard.interchange.source import TensorMeta

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HfFiles:
    """A source of safetensors files. Links are followed: the Hub's cache consists of them.

    Args:
        path: a ``.safetensors`` file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there is no such file, or it has another format; ``DamagedError`` if it is incomplete.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(path)
        self._headers: dict[Path, dict[str, tensorfile.Stored]] = {}
        self._sizes: dict[Path, int] = {}
        self.files: dict[str, Path] = {}
        self.tensors: dict[str, TensorMeta] = {}
        files, weights = _find_files(Path(path))
        for file in files:
            self._add(file)
        if weights is not None:
            _check_index(Path(path), weights, {name: file.name for name, file in self.files.items()})

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Read the blocks from the file."""
        file = self.files[name]
        stored = self._headers[file][name]
        with _open(file, self._sizes[file]) as opened:
            for block, out in parts:
                read_box(opened, stored.begin, stored.shape, block.offset, out, stored.dtype)

    def check_dense(self) -> None:
        """Refuse files that consist almost only of holes, before memory is allocated by their sizes."""
        for file, size in self._sizes.items():
            with _open(file, size) as opened:
                opened.check_dense()

    def _add(self, file: Path) -> None:
        """Add the tensors of a file."""
        with _open(file) as opened:
            start = bytes(opened.read(0, min(4, opened.size)))
            if start == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
                raise _pickle(file)
            self._headers[file], self._sizes[file] = tensorfile.header_of(opened)[0], opened.size
        for name, stored in self._headers[file].items():
            if name in self.files:
                raise DamagedError(
                    f"{printable(name)} is in {self.files[name]} and in {file}: remove the file that does not belong"
                )
            self.files[name], self.tensors[name] = file, TensorMeta(stored.shape, stored.dtype)


def _find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a model, and each tensor's file if there is an index."""
    if not path.is_dir() and path.name != INDEX and os.path.lexists(path):
        return [path], None
    folder = path if path.name != INDEX else path.parent
    if path.name != INDEX and os.path.lexists(folder / SINGLE):
        return [folder / SINGLE], None
    weights = _read_index(folder)
    return [folder / name for name in dict.fromkeys(weights.values())], weights


def _open(path: Path, size: int | None = None) -> AbstractContextManager[File]:
    """An open file, for reading."""
    return open_file(str(path.parent), path.name, size, links=True, folder_link=True, refuse=_incomplete)


def _incomplete(path: str, problems: Iterable[str]) -> CheckpointError:
    reasons = "; ".join(listed(list(problems)))
    return DamagedError(f"{path} is not a whole safetensors file: {reasons}. Fetch or write it again.")


def _pickle(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a pickle, as torch.save writes it, which can run code when it is loaded: fshard reads none. "
        f"If you trust it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    )


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor in the index."""
    path = folder / INDEX
    if not os.path.lexists(path):
        raise _no_model(folder)
    with open_file(str(folder), INDEX, links=True, folder_link=True, refuse=unusable) as file:
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
        raise DamagedError(lines(f"{path} names files that it may not name:", listed(outside), remedy))
    gone = sorted(name for name in names if not os.path.exists(folder / name))
    if gone:
        raise DamagedError(lines(f"{path} names files that do not exist:", listed(gone), "Fetch or write them again."))
    return dict(weights)


def _check_index(path: Path, weights: Mapping[str, str], held: Mapping[str, str]) -> None:
    missing = [name for name in weights if name not in held]
    wrong = [f"{name}: the index says {weights[name]}, which does not hold it" for name in missing]
    wrong += [
        f"{name}: the index says {weights.get(name, 'nothing')}, and it is in {file}"
        for name, file in held.items()
        if weights.get(name) != file
    ]
    if wrong:
        head = f"the index of {path} does not describe its files:"
        raise DamagedError(lines(head, listed(wrong), "Write the index again."))


def _no_model(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(
            f"{folder} does not exist: give a folder or a .safetensors file; huggingface_hub.snapshot_download(name) "
            f"fetches a model of the Hub and returns its folder"
        )
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    also = f" It holds {', '.join(pickles)}: pickles, which can run code, are not read." if pickles else ""
    return CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.{also} Save the model as safetensors.")


class HfWriter:
    """Writes a model's files tensor by tensor, under temporary names until all of them are complete.

    Args:
        folder: the folder to write to.
        tensors: the shapes and dtypes by name, in the order in which the tensors will be written.
        limit: the most bytes of a file with more than one tensor.
        overwrite: whether ``publish`` may replace weights that are in the folder.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorMeta], limit: int, overwrite: bool = False) -> None:
        self.folder, self.overwrite = folder, overwrite
        self.parts = split_files(tensors, limit)
        self.names = _names(len(self.parts))
        self.total = sum(meta.nbytes for meta in tensors.values())
        self.left: list[str] = []
        self.file: BinaryIO | None = None
        self.begun: list[Path] = []

    def prepare(self) -> None:
        """Make the folder; raise a CheckpointError if it holds weights that may not be replaced."""
        old = _weights_in(self.folder)
        if old and not self.overwrite:
            remedy = "Write to another folder, or remove them; save_hf(overwrite=True) replaces them."
            names = [file.name for file in old]
            raise CheckpointError(lines(f"{self.folder} holds weights already:", names, remedy))
        with file_errors("write to", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        with file_errors("write to", str(self.folder)):
            file = self.file if self.file is not None and self.left else self._next_file()
            if self.left.pop(0) != name:
                raise AssertionError(f"{name} comes out of order")
            flat = tensor.detach().cpu().contiguous()
            file.write(raw(flat))

    def publish(self, config: Mapping[str, Any] | None = None) -> None:
        """Rename all files, add the index and ``config.json``, and remove the weights that they replace."""
        with file_errors("write to", str(self.folder)):
            old = _weights_in(self.folder)
            self._close()
            for partial, name in zip(self.begun, self.names, strict=True):
                partial.replace(self.folder / name)
            if len(self.names) > 1:
                weights = {name: file for part, file in zip(self.parts, self.names, strict=True) for name in part}
                index = {"metadata": {"total_size": self.total}, "weight_map": weights}
                _write_json(self.folder / INDEX, index)
            for file in old:
                if file.name not in self.names and not (file.name == INDEX and len(self.names) > 1):
                    file.unlink()
            if config is not None:
                _write_json(self.folder / "config.json", config)

    def discard(self) -> None:
        """Remove the files that have no final name."""
        if self.file is not None:
            self.file.close()
        for partial in self.begun:
            partial.unlink(missing_ok=True)

    def _next_file(self) -> BinaryIO:
        self._close()
        number = len(self.begun)
        self.left = list(self.parts[number])
        self.begun.append(self.folder / f"{self.names[number]}.partial")
        self.file = open(self.begun[-1], "wb")
        header = {name: (meta.dtype, meta.shape) for name, meta in self.parts[number].items()}
        self.file.write(write_header(header, {"format": "pt"}))
        return self.file

    def _close(self) -> None:
        """Sync and close the file that is being written."""
        if self.left:
            raise AssertionError(f"{self.left} were not written")
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()


def split_files(tensors: Mapping[str, TensorMeta], limit: int) -> list[dict[str, TensorMeta]]:
    """Tensors in files of at most ``limit`` bytes, or of one tensor."""
    files: list[dict[str, TensorMeta]] = []
    room = -1
    for name, meta in tensors.items():
        if not files or meta.nbytes > room:
            files.append({})
            room = limit
        files[-1][name] = meta
        room -= meta.nbytes
    return files


def _names(count: int) -> list[str]:
    """The names of the files of one model."""
    return [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]


def _write_json(path: Path, value: Any) -> None:
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _weights_in(folder: Path) -> list[Path]:
    """Weights in a folder that a reader could take for the new ones."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "pytorch_model*.bin*")
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def size_in_bytes(size: int | str) -> int:
    """A size such as ``5000000``, ``"5GB"`` or ``"512MiB"``; a PlanError for any other value.

    >>> size_in_bytes("2KB"), size_in_bytes("2KiB")
    (2000, 2048)
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
