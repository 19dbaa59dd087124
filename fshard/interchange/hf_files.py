"""Files of Hugging Face models: one safetensors file, or several with an index.

Files are written tensor by tensor: shapes and dtypes determine their headers.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from fshard.checkpoint import tensorfile
from fshard.checkpoint.tensorfile import TensorMeta, write_header
from fshard.checkpoint.write import new_file, raw
from fshard.errors import CheckpointError, DamagedError, lines
from fshard.interchange.source import read_box
from fshard.reading.files import File, file_errors, is_plain_name, listed, open_file, printable, unusable
from fshard.reading.texts import parse_json
from fshard.sharding.spec import Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HfFiles:
    """A source of safetensors files: one, or a folder. Links are followed: the Hub's cache consists of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(path)
        self._sizes: dict[Path, int] = {}
        self.files: dict[str, Path] = {}
        self.tensors: dict[str, tensorfile.Stored] = {}
        files, weights = _find_files(Path(path))
        for file in files:
            self._add(file)
        if weights is not None:
            self._check_index(weights)

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Read the boxes from the file."""
        path, stored = self.files[name], self.tensors[name]
        with _open(path, self._sizes[path]) as file:
            for offset, out in parts:
                read_box(file, stored.begin, stored.shape, offset, out, stored.dtype)

    def check_dense(self) -> None:
        """Refuse files that consist almost only of holes, before memory is allocated by their sizes."""
        for file, size in self._sizes.items():
            with _open(file, size) as opened:
                opened.check_dense()

    def _add(self, file: Path) -> None:
        """Add the tensors of a file."""
        with _open(file) as opened:
            if is_pickle(bytes(opened.read(0, min(tensorfile.START, opened.size)))):
                raise CheckpointError(
                    f"{file} is a pickle, as torch.save writes it, which can run code when it is loaded: fshard reads "
                    f"none. If you trust it, convert it: "
                    f"safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
                )
            header, self._sizes[file] = tensorfile.read_header(opened), opened.size
        for name, stored in header.items():
            if name in self.files:
                raise DamagedError(
                    f"{printable(name)} is in {self.files[name]} and in {file}: remove the file that does not belong"
                )
            self.files[name], self.tensors[name] = file, stored

    def _check_index(self, weights: Mapping[str, str]) -> None:
        missing = [name for name in weights if name not in self.files]
        wrong = [f"{name}: the index says {weights[name]}, which does not hold it" for name in missing]
        for name, path in self.files.items():
            if weights.get(name) != path.name:
                wrong.append(f"{name}: the index says {weights.get(name, 'nothing')}, and it is in {path.name}")
        if wrong:
            head = f"the index of {self.name} does not describe its files:"
            raise DamagedError(lines(head, listed(wrong), "Write the index again."))


def _find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a model, and each tensor's file if there is an index."""
    if not path.is_dir() and path.name != INDEX and os.path.lexists(path):
        return [path], None
    folder = path if path.name != INDEX else path.parent
    if path.name != INDEX and os.path.lexists(folder / SINGLE):
        return [folder / SINGLE], None
    weights = _read_index(folder)
    return [folder / name for name in dict.fromkeys(weights.values())], weights


def is_pickle(start: bytes) -> bool:
    """Tell whether a file begins as torch.save writes it, and not as safetensors do.

    The first bytes of a pickle are also header lengths: ``80 02`` is 640 of them.

    >>> is_pickle(b"\\x80\\x02}q\\x00."), is_pickle((640).to_bytes(8, "little") + b"{")
    (True, False)
    """
    if tensorfile.is_start(start):
        return False
    return start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _open(path: Path, size: int | None = None) -> AbstractContextManager[File]:
    """An open file, for reading."""
    return open_file(str(path.parent), path.name, size, links=True, folder_link=True, refuse=_incomplete)


def _incomplete(path: str, problems: Iterable[str]) -> CheckpointError:
    reasons = "; ".join(listed(list(problems)))
    return DamagedError(f"{path} is not a whole safetensors file: {reasons}. Fetch or write it again.")


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor in the index."""
    path = folder / INDEX
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist: give a folder or a .safetensors file; huggingface_hub.snapshot_download(name) "
            f"fetches a model of the Hub and returns its folder"
        )
    if not os.path.lexists(path):
        pickles = [file.name for kind in ("*.bin", "*.pt*") for file in sorted(folder.glob(kind))]
        also = f" It holds {', '.join(pickles)}: pickles, which can run code, are not read." if pickles else ""
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.{also} Save the model as safetensors.")
    with open_file(str(folder), INDEX, links=True, folder_link=True, refuse=unusable) as file:
        if file.size > tensorfile.LIMIT:
            raise DamagedError(f"{path} is not an index: it has {file.size} bytes, of at most {tensorfile.LIMIT}")
        text = file.text(0, file.size)
    try:
        weights = parse_json(text, tensorfile.SPACE)["weight_map"]
        strings = all(isinstance(k, str) and isinstance(v, str) for k, v in weights.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not an index: {type(error).__name__}: {printable(str(error))}") from error
    if not strings or not weights:
        raise DamagedError(f"{path} is not an index: weight_map gives the name of a file for each tensor")
    _check_files(folder, dict.fromkeys(weights.values()))
    return dict(weights)


def _check_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse files of an index that lie elsewhere, are no safetensors, or do not exist."""
    path = folder / INDEX
    outside = sorted(name for name in names if not is_plain_name(name) or not name.endswith(".safetensors"))
    if outside:
        remedy = "Only safetensors files beside the index are read."
        raise DamagedError(lines(f"{path} names files that it may not name:", listed(outside), remedy))
    gone = sorted(name for name in names if not os.path.exists(folder / name))
    if gone:
        raise DamagedError(lines(f"{path} names files that do not exist:", listed(gone), "Fetch or write them again."))


class HfWriter:
    """Writes a model's files tensor by tensor, under temporary names until all of them are complete.

    Tensors are written in the order of ``tensors``. A file with more than one has at most ``limit`` bytes of data.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorMeta], limit: int, overwrite: bool = False) -> None:
        self.folder, self.overwrite = folder, overwrite
        parts = split_files(tensors, limit)
        several = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
        self.files = dict(zip([SINGLE] if len(parts) == 1 else several, parts, strict=True))
        self.order = [(name, file) for file, part in self.files.items() for name in part]
        self.total = sum(meta.nbytes for meta in tensors.values())
        self.begun: list[Path] = []

    def prepare(self) -> None:
        """Begin the files; raise a CheckpointError if the folder holds weights that may not be replaced."""
        old = _weights_in(self.folder)
        if old and not self.overwrite:
            remedy = "Write to another folder, or remove them; save_hf(overwrite=True) replaces them."
            names = [file.name for file in old]
            raise CheckpointError(lines(f"{self.folder} holds weights already:", names, remedy))
        with file_errors("write to", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file, part in self.files.items():
                self.begun.append(self._partial(file))
                self.begun[-1].write_bytes(write_header(part, {"format": "pt"}))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        expected, file = self.order.pop(0)
        if name != expected:
            raise AssertionError(f"{name} comes out of order")
        flat = tensor.detach().cpu().contiguous()
        with file_errors("write to", str(self.folder)), open(self._partial(file), "ab") as out:
            out.write(raw(flat))

    def publish(self, config: Mapping[str, Any] | None = None) -> None:
        """Rename all files, add the index and ``config.json``, and remove the weights that they replace."""
        if self.order:
            raise AssertionError(f"{self.order} were not written")
        several = len(self.files) > 1
        with file_errors("write to", str(self.folder)):
            old = _weights_in(self.folder)
            for file in self.files:
                with open(self._partial(file), "ab") as out:
                    os.fsync(out.fileno())
            for file in self.files:
                self._partial(file).replace(self.folder / file)
            if several:
                weights = {name: file for file, part in self.files.items() for name in part}
                _write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": weights})
            for path in old:
                if path.name not in self.files and not (path.name == INDEX and several):
                    path.unlink()
            if config is not None:
                _write_json(self.folder / "config.json", config)

    def discard(self) -> None:
        """Remove the files that have no final name."""
        for partial in self.begun:
            partial.unlink(missing_ok=True)

    def _partial(self, file: str) -> Path:
        return self.folder / f"{file}.partial"


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


def _write_json(path: Path, value: Any) -> None:
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _weights_in(folder: Path) -> list[Path]:
    """Weights in a folder that a reader could take for the new ones."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "pytorch_model*.bin*")
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})
