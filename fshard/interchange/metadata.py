"""The ``.metadata`` file of a torch.distributed.checkpoint folder, read as data.

It is a pickle, and a pickle may call whatever its reader lets it. This reader lets it name the dozen classes that such
files consist of, and gives it stand-ins for them, which keep what they are given and do nothing. So no code of the
file's choice runs, nor any of torch's; any other name is refused.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint.ranges import Block, overlap
from fshard.errors import CheckpointError, DamagedError, lines
from fshard.interchange.source import Stored
from fshard.sharding.spec import Shape

FILE = ".metadata"
LIMIT = 1 << 30
"""Bytes of the file, at most."""

RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
"""The classes that become records, by module."""

PATHS = ("pathlib", "pathlib._local")


@dataclass(frozen=True)
class Extent:
    """Bytes of one file, in the folder."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it lies."""

    block: Block
    where: Extent


@dataclass(frozen=True)
class Contents:
    """What a folder holds: tensors with their chunks, and other values, by name."""

    tensors: Mapping[str, Stored]
    chunks: Mapping[str, tuple[Chunk, ...]]
    others: Mapping[str, Extent]


class Record:
    """What stands for an instance of one of the known classes: the arguments and the state that the file gave it."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __new__(cls, *args: Any) -> "Record":
        """Also made without ``__init__``, as pickles do."""
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def get(self, name: str) -> Any:
        """A field; None if the file does not give it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_metadata(folder: Path) -> Contents:
    """What a folder holds, as its ``.metadata`` says, checked against the files beside it.

    Raises:
        CheckpointError: there is none, or it names something that such a file has no business with.
        DamagedError: it is not whole, or does not fit the files.
    """
    file = folder / FILE
    try:
        size = file.stat().st_size
        text = file.read_bytes() if size <= LIMIT else b""
    except OSError as error:
        hint = "give the folder that dcp.save wrote to, whose file .metadata comes last"
        raise CheckpointError(f"{file} cannot be read: {error.strerror}: {hint}") from error
    if size > LIMIT:
        raise DamagedError(f"{file} has {size} bytes, and {LIMIT} are the most that are read")
    top = unpickle(text, str(file))
    if not isinstance(top, Record) or top.kind != "Metadata":
        raise DamagedError(f"{file} holds a {type(top).__name__}, not the Metadata of torch.distributed.checkpoint")
    problems: list[str] = []
    places = _places(top.get("storage_data"), folder, problems)
    contents = _contents(top.get("state_dict_metadata"), places, problems)
    if problems:
        raise DamagedError(lines(f"{file} is damaged, or does not fit its folder:", problems[:20], "Copy it anew."))
    return contents


def unpickle(text: bytes, name: str) -> Any:
    """A pickle of known classes, as records.

    Raises:
        CheckpointError: it names anything else.
        DamagedError: it is no whole pickle.
    """
    try:
        return _Reader(io.BytesIO(text), name).load()
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle can raise almost anything
        raise DamagedError(f"{name} is no whole pickle: {type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    """An unpickler that knows a few names only."""

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self.name = name
        self.kinds = {
            (module, kind): type(kind, (Record,), {"kind": kind}) for module, kinds in RECORDS.items() for kind in kinds
        }

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if (module, name) in self.kinds:
            return self.kinds[module, name]
        if (module, name) == ("torch", "Size"):
            return _sizes
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if module in PATHS and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return _path
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(value, torch.dtype):
            return value
        raise CheckpointError(
            f"{self.name} names {module}.{name}, which no metadata of a checkpoint needs, and which could run code: it "
            f"was not read. Load it with torch.distributed.checkpoint where you trust it, and save plain tensors."
        )

    def persistent_load(self, pid: Any) -> Any:
        """Pickles of metadata have no such things."""
        raise CheckpointError(f"{self.name} refers to objects outside of it, which no metadata does: it was not read")


def _sizes(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _places(data: Any, folder: Path, problems: list[str]) -> dict[tuple[str, Shape | None], Extent]:
    """Where each tensor's chunk, by name and offset, or other value lies."""
    out: dict[tuple[str, Shape | None], Extent] = {}
    sizes: dict[str, int] = {}
    for index, info in (data if isinstance(data, dict) else {}).items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            problems.append(f"storage_data holds {type(index).__name__}: {type(info).__name__}")
            continue
        name, offset = index.get("fqn"), index.get("offset")
        file, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not _is_shape(offset, None) or not isinstance(file, str):
            problems.append(f"storage_data: {str(name)[:80]!r} at {str(offset)[:80]} in {str(file)[:80]!r}")
        elif Path(file).name != file or file in ("", ".", ".."):
            problems.append(f"{name}: lies in {file!r}, and only files in the folder itself are read")
        elif info.get("transform_descriptors"):
            problems.append(
                f"{name}: was transformed by {info.get('transform_descriptors')!r}, which is not undone here"
            )
        elif not _is_count(begin) or not _is_count(length) or begin + length > _size(folder / file, sizes):
            problems.append(f"{name}: bytes {begin} to +{length} of {file}, which has {_size(folder / file, sizes)}")
        else:
            out[name, offset] = Extent(file, begin, length)
    return out


def _contents(listed: Any, places: dict[tuple[str, Shape | None], Extent], problems: list[str]) -> Contents:
    tensors: dict[str, Stored] = {}
    chunks: dict[str, tuple[Chunk, ...]] = {}
    others: dict[str, Extent] = {}
    for name, what in (listed if isinstance(listed, dict) else {}).items():
        kind = what.kind if isinstance(what, Record) else ""
        if kind == "BytesStorageMetadata" and (name, None) in places:
            others[name] = places[name, None]
        elif kind == "TensorStorageMetadata" and isinstance(name, str):
            found = _tensor(name, what, places, problems)
            if found is not None:
                tensors[name], chunks[name] = found
        else:
            problems.append(f"{str(name)[:80]!r}: a {kind or type(what).__name__} that lies nowhere")
    if not tensors:
        problems.append("it lists no tensor")
    return Contents(tensors, chunks, others)


def _tensor(
    name: str, what: Record, places: dict[tuple[str, Shape | None], Extent], problems: list[str]
) -> tuple[Stored, tuple[Chunk, ...]] | None:
    """One tensor; its chunks must fill it."""
    shape, rows, properties = what.get("size"), what.get("chunks"), what.get("properties")
    dtype = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
    if not isinstance(dtype, torch.dtype) or not _is_shape(shape, None) or shape is None or not isinstance(rows, list):
        problems.append(f"{name}: dtype {dtype}, size {str(shape)[:80]}, chunks in a {type(rows).__name__}")
        return None
    out = []
    for row in rows:
        ends: tuple[Any, Any] = (row.get("offsets"), row.get("sizes")) if isinstance(row, Record) else (None, None)
        good = all(_is_shape(value, len(shape)) and value is not None for value in ends)
        offset, sizes = ends if good else ((0,) * len(shape), (-1,) * len(shape))
        if not good or any(o + n > whole for o, n, whole in zip(offset, sizes, shape, strict=True)):
            problems.append(f"{name}: a chunk of offset and size {str(ends)[:160]} in {list(shape)}")
        elif 0 in sizes:
            continue  # what a rank with nothing to write left behind
        elif (name, offset) not in places:
            problems.append(f"{name}: the chunk at {list(offset)} lies nowhere")
        else:
            out.append(Chunk(Block(offset, sizes, 0), places[name, offset]))
    if not problems and not _fill(shape, [chunk.block for chunk in out]):
        problems.append(f"{name}: its {len(out)} chunks do not fill {list(shape)} without gap or overlap")
    return Stored(shape, dtype), tuple(out)


def _fill(shape: Shape, parts: list[Block]) -> bool:
    """Whether blocks are all of a tensor, each element once. Sorted, only those that can meet are compared."""
    held = [part for part in parts if part.numel]
    if sum(part.numel for part in held) != torch.Size(shape).numel():
        return False
    held.sort(key=lambda part: part.offset)
    for number, part in enumerate(held):
        for other in held[number + 1 :]:
            if shape and other.offset[0] >= part.offset[0] + part.shape[0]:
                break
            if overlap(part, other) is not None:
                return False
    return True


def _size(file: Path, known: dict[str, int]) -> int:
    if file.name not in known:
        known[file.name] = file.stat().st_size if file.is_file() and not file.is_symlink() else -1
    return known[file.name]


def _is_shape(value: Any, dims: int | None) -> bool:
    return value is None or (
        isinstance(value, tuple) and all(map(_is_count, value)) and (dims is None or len(value) == dims)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
