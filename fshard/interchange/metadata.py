"""The ``.metadata`` file of a torch.distributed.checkpoint folder, read as data.

It is a pickle, whose opcodes are read (``pickles.py``) and never run. It may contain the names of the dozen classes
that such files consist of, which become records; any other name is refused. Its contents are compared with the files
beside it before any of them is read.
"""

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint.ranges import Block
from fshard.checkpoint.tensorfile import DIMS, TensorMeta, is_count, is_shape
from fshard.errors import MOST, CheckpointError, DamagedError, lines
from fshard.interchange.archive import DTYPES
from fshard.interchange.pickles import CallRecord, GlobalName, UnknownNameError, read_pickle
from fshard.reading.files import File, folder_at, is_plain_name, plain_file, printable, unusable
from fshard.sharding.spec import Shape

FILE = ".metadata"
LIMIT = 1 << 30
"""The most bytes of the file."""

SIZE = GlobalName("torch", "Size")
PATHS = "PosixPath WindowsPath PurePosixPath PureWindowsPath"
ENCODING = "_MEM_FORMAT_ENCODING"
"""An enum, whose members some versions of Python write by their names."""

NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        f"StorageMeta {ENCODING} {ENCODING}.TORCH_CONTIGUOUS_FORMAT {ENCODING}.TORCH_CHANNELS_LAST "
        f"{ENCODING}.TORCH_PRESERVE_FORMAT"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": " ".join(["Size", *DTYPES]),
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}
KNOWN = frozenset(GlobalName(module, name) for module, names in NAMES.items() for name in names.split())
"""The names that metadata may contain."""

PRIME = (1 << 61) - 1

HINT = "give the folder that dcp.save wrote to, whose file .metadata comes last"


@dataclass(frozen=True)
class FileRange:
    """``length`` bytes of a file in the folder, from byte ``begin`` on."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and its place."""

    block: Block
    where: FileRange


@dataclass(frozen=True)
class Contents:
    """The content of a folder: tensors with their chunks, and other values, by name."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    chunks: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)
    others: dict[str, FileRange] = field(default_factory=dict)

    def add(self, name: str, shape: Shape, dtype: torch.dtype, where: FileRange) -> None:
        """Add a tensor that is one chunk."""
        self.tensors[name] = TensorMeta(shape, dtype)
        self.chunks[name] = (Chunk(Block((0,) * len(shape), shape, 0), where),)


def read_metadata(folder: Path) -> Contents:
    """The contents of a folder by its ``.metadata``, compared with the files beside it."""
    path = str(folder / FILE)
    problems: list[str] = []
    try:
        with folder_at(str(folder), links=True) as at:

            @functools.cache
            def size_of(name: str) -> int:
                """The size of a regular file in the folder; -1 for any other name."""
                with suppress(CheckpointError, OSError), plain_file(str(folder), name, at, refuse=unusable) as file:
                    return file.size
                return -1

            with plain_file(str(folder), FILE, at, refuse=_unreadable) as file:
                top = _unpickled(file)
            places = _places(top.get("storage_data"), size_of, problems)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}: {HINT}") from error
    contents = _contents(top.get("state_dict_metadata"), places, problems)
    if problems:
        rows = [printable(problem) for problem in problems[:20]]
        raise DamagedError(lines(f"{path} is damaged, or does not fit its folder:", rows, "Copy it again."))
    return contents


def _unreadable(path: str, problems: Iterable[str]) -> CheckpointError:
    return DamagedError(f"{path} cannot be read: {'; '.join(problems)}: {HINT}")


def _unpickled(file: File) -> CallRecord:
    """The record in the pickle, which must be a ``Metadata``."""
    if file.size > LIMIT:
        raise DamagedError(f"{file.path} has {file.size} bytes, and {LIMIT} are the most that are read")
    file.check_dense()
    try:
        top = read_pickle(file.read(0, file.size), KNOWN.__contains__)
    except UnknownNameError as error:
        raise CheckpointError(
            f"{file.path} names {printable(str(error))}, which no metadata of a checkpoint needs, and which could run "
            f"code: it was not read. If you trust it, load it with torch.distributed.checkpoint and save plain tensors."
        ) from None
    except ValueError as error:
        raise DamagedError(f"{file.path} is not a whole pickle of metadata: {printable(str(error))}") from error
    if not isinstance(top, CallRecord) or kind_of(top) != "Metadata":
        raise DamagedError(f"{file.path} holds a {kind_of(top)}, not the Metadata of torch.distributed.checkpoint")
    return top


def kind_of(value: Any) -> str:
    """The name of a value's class."""
    return value.of.name if isinstance(value, CallRecord) else type(value).__name__


def place_of(name: str, offset: Shape | None) -> str:
    """The key of a chunk: a text, since chosen tuples of numbers can all have the same hash."""
    return f"{name}\0{offset}"


def _places(data: Any, size_of: Callable[[str], int], problems: list[str]) -> dict[str, FileRange]:
    """The place of each chunk, by name and offset, and of each other value."""
    out: dict[str, FileRange] = {}
    for index, info in (data if isinstance(data, dict) else {}).items():
        try:
            key, where = _place(index, info, size_of)
            if key in out:
                raise ValueError(f"{index.get('fqn')}: the chunk at {_shape(index.get('offset'))} lies in two places")
            out[key] = where
        except ValueError as error:
            problems.append(str(error))
        if len(problems) >= MOST:
            break
    return out


def _place(index: Any, info: Any, size_of: Callable[[str], int]) -> tuple[str, FileRange]:
    """The key and the place of a chunk or another value; a ValueError says what is wrong with it."""
    if not isinstance(index, CallRecord) or not isinstance(info, CallRecord):
        raise ValueError(f"storage_data holds {kind_of(index)}: {kind_of(info)}")
    name, offset = index.get("fqn"), _shape(index.get("offset"))
    file, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    misplaced = offset is None and index.get("offset") is not None
    if not isinstance(name, str) or not isinstance(file, str) or misplaced:
        raise ValueError(f"storage_data: {shown(name)} at {shown(index.get('offset'))} in {shown(file)}")
    if not is_plain_name(file):
        raise ValueError(f"{name}: lies in {file!r}, but only files in the folder itself are read")
    if transform := info.get("transform_descriptors"):
        raise ValueError(f"{name}: was transformed by {shown(transform)}, which fshard cannot undo")
    if not is_count(begin) or not is_count(length) or begin + length > size_of(file):
        raise ValueError(f"{name}: bytes {shown(begin)} to +{shown(length)} of {file}, which has {size_of(file)}")
    return place_of(name, offset), FileRange(file, begin, length)


def _contents(listed: Any, places: dict[str, FileRange], problems: list[str]) -> Contents:
    """The tensors and values that the metadata lists."""
    out = Contents()
    for name, what in (listed if isinstance(listed, dict) else {}).items():
        kind = kind_of(what)
        try:
            if not isinstance(name, str):
                raise ValueError(f"state_dict_metadata holds a {kind_of(name)}")
            if kind == "BytesStorageMetadata" and place_of(name, None) in places:
                out.others[name] = places[place_of(name, None)]
            elif kind == "TensorStorageMetadata":
                out.tensors[name], out.chunks[name] = _tensor(name, what, places)
            else:
                raise ValueError(f"{name!r}: a {kind} that lies nowhere")
        except ValueError as error:
            problems.append(str(error))
        if len(problems) >= MOST:
            break
    if not out.tensors and not problems:
        problems.append("it lists no tensor")
    return out


def _tensor(name: str, what: CallRecord, places: dict[str, FileRange]) -> tuple[TensorMeta, tuple[Chunk, ...]]:
    """One tensor, which its chunks must fill; a ValueError says what is wrong with it."""
    shape, rows, properties = _shape(what.get("size")), what.get("chunks"), what.get("properties")
    state = properties.state if isinstance(properties, CallRecord) else None
    of = state[0] if isinstance(state, tuple) and state else None
    dtype = DTYPES.get(of.name) if isinstance(of, GlobalName) and of.module == "torch" else None
    if dtype is None or shape is None or not isinstance(rows, list):
        raise ValueError(f"{name}: dtype {shown(of)}, size {shown(what.get('size'))}, chunks in a {kind_of(rows)}")
    chunks = tuple(chunk for row in rows if (chunk := _chunk(name, shape, row, places)) is not None)
    if not filled(shape, [chunk.block for chunk in chunks]):
        raise ValueError(f"{name}: its {len(chunks)} chunks do not fill {list(shape)} without gap or overlap")
    return TensorMeta(shape, dtype), chunks


def _chunk(name: str, shape: Shape, row: Any, places: dict[str, FileRange]) -> Chunk | None:
    """One chunk of a tensor; None for that of a rank that had nothing to write."""
    given = [row.get(key) for key in ("offsets", "sizes")] if isinstance(row, CallRecord) else [None, None]
    offset, sizes = map(_shape, given)
    if (
        offset is None
        or sizes is None
        or not len(offset) == len(sizes) == len(shape)
        or any(o + n > m for o, n, m in zip(offset, sizes, shape, strict=True))
    ):
        raise ValueError(f"{name}: a chunk of offset and size {list(map(shown, given))} in {list(shape)}")
    if 0 in sizes:
        return None
    where = places.get(place_of(name, offset))
    if where is None:
        raise ValueError(f"{name}: the chunk at {list(offset)} lies nowhere")
    return Chunk(Block(offset, sizes, 0), where)


def filled(shape: Shape, parts: Sequence[Block]) -> bool:
    """Tell whether blocks inside of a tensor hold each of its elements once; linear in their number.

    Boxes fill a box if and only if the polynomials ``sum over boxes, product over dims, x[dim, begin] - x[dim, end]``
    of both are equal. They are compared at a random point modulo a prime, which the author of the boxes cannot know:
    different polynomials are equal there with a probability below 2**-54 (Schwartz and Zippel).
    """
    draw = random.SystemRandom()
    at: list[dict[int, int]] = [{} for _ in shape]

    def value(offset: Shape, sizes: Shape) -> int:
        out = 1
        for known, begin, size in zip(at, offset, sizes, strict=True):
            for n in (begin, begin + size):
                if n not in known:
                    known[n] = draw.randrange(PRIME)
            out = out * (known[begin] - known[begin + size]) % PRIME
        return out

    held = [part for part in parts if part.numel]
    if 0 in shape or not held:
        return 0 in shape and not held
    total = sum(value(part.offset, part.shape) for part in held)
    return total % PRIME == value((0,) * len(shape), shape)


def _shape(value: Any) -> Shape | None:
    """The sizes in a ``torch.Size``, as DCP writes it, or in a tuple; None for any other value."""
    if isinstance(value, CallRecord) and value.of == SIZE and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, tuple) and is_shape(list(value[: DIMS + 1])) else None


def shown(value: Any) -> str:
    """The beginning of an untrusted value for a message. Nested parts are left out: a value may contain itself."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:80] if not isinstance(value, int) or -PRIME < value < PRIME else "a huge number"
    if isinstance(value, CallRecord) and value.of == SIZE and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, GlobalName):
        return f"{value.module}.{value.name}"[:80]
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(n) if isinstance(n, str | int) else '...' for n in value[:8])}]"[:160]
    return f"a {kind_of(value)}"
