"""The ``.metadata`` file of a torch.distributed.checkpoint folder, read as data.

It is a pickle, whose opcodes are read here (``pickles.py``) and not run. It may mention the dozen classes that such
files consist of, which become records; any other name is refused. What it says is held against the files beside it
before anything is read of them.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fshard.checkpoint.files import File, folder_at, is_plain_name, plain_file
from fshard.checkpoint.problems import printable, unusable
from fshard.checkpoint.ranges import Block
from fshard.checkpoint.tensorfile import DIMS, LARGEST, is_count
from fshard.errors import MOST, CheckpointError, DamagedError, lines
from fshard.interchange.archive import DTYPES
from fshard.interchange.pickles import Made, Name, UnknownNameError, read_pickle
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

SIZE, LAYOUT = Name("torch", "Size"), Name("torch.serialization", "_get_layout")

PRIME = (1 << 61) - 1

HINT = "give the folder that dcp.save wrote to, whose file .metadata comes last"


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


def read_metadata(folder: Path) -> Contents:
    """What a folder holds, as its ``.metadata`` says, checked against the files beside it.

    Raises:
        CheckpointError: there is none, or it names something that such a file has no business with.
        DamagedError: it is not whole, or does not fit the files.
    """
    path = str(folder / FILE)
    problems: list[str] = []
    try:
        with folder_at(str(folder), links=True) as at:
            with plain_file(str(folder), FILE, at, refuse=_unreadable) as file:
                top = _unpickled(file)
            places = _places(top.get("storage_data"), Sizes(str(folder), at), problems)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}: {HINT}") from error
    contents = _contents(top.get("state_dict_metadata"), places, problems)
    if problems:
        rows = [printable(problem) for problem in problems[:20]]
        raise DamagedError(lines(f"{path} is damaged, or does not fit its folder:", rows, "Copy it anew."))
    return contents


def _unreadable(path: str, problems: Iterable[str]) -> CheckpointError:
    return DamagedError(f"{path} cannot be read: {'; '.join(problems)}: {HINT}")


def _unpickled(file: File) -> Made:
    """What the pickle describes, which must be a ``Metadata``."""
    if file.size > LIMIT:
        raise DamagedError(f"{file.path} has {file.size} bytes, and {LIMIT} are the most that are read")
    file.check_dense()
    try:
        top = read_pickle(file.read(0, file.size), _known)
    except UnknownNameError as error:
        raise CheckpointError(
            f"{file.path} names {printable(str(error))}, which no metadata of a checkpoint needs, and which could run "
            f"code: it was not read. Load it with torch.distributed.checkpoint where you trust it, save plain tensors."
        ) from None
    except ValueError as error:
        raise DamagedError(f"{file.path} is no whole pickle of metadata: {printable(str(error))}") from error
    if not isinstance(top, Made) or kind_of(top) != "Metadata":
        raise DamagedError(f"{file.path} holds a {kind_of(top)}, not the Metadata of torch.distributed.checkpoint")
    return top


def _known(name: Name) -> bool:
    """Whether metadata may mention a name."""
    if name in (SIZE, LAYOUT):
        return True
    if name.module in PATHS:
        return name.name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    return name.name in RECORDS.get(name.module, ()) or (name.module == "torch" and name.name in DTYPES)


def kind_of(value: Any) -> str:
    """What a value is: the name of its class."""
    return value.of.name if isinstance(value, Made) else type(value).__name__


class Sizes:
    """The sizes of the plain files in an open folder; -1 for what is none."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at
        self.known: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The size of one."""
        if name not in self.known:
            self.known[name] = -1
            with suppress(CheckpointError, OSError), plain_file(self.path, name, self.at, refuse=unusable) as file:
                self.known[name] = file.size
        return self.known[name]


def place_of(name: str, offset: Shape | None) -> str:
    """The key of a chunk: text, since tuples of chosen numbers can be made to have one hash."""
    return f"{name}\0{offset}"


def _places(data: Any, sizes: Sizes, problems: list[str]) -> dict[str, Extent]:
    """Where each tensor's chunk, by name and offset, or other value lies."""
    out: dict[str, Extent] = {}
    for index, info in (data if isinstance(data, dict) else {}).items():
        if not isinstance(index, Made) or not isinstance(info, Made):
            problems.append(f"storage_data holds {kind_of(index)}: {kind_of(info)}")
            continue
        name, offset = index.get("fqn"), _shape(index.get("offset"))
        file, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if (
            not isinstance(name, str)
            or (offset is None and index.get("offset") is not None)
            or not isinstance(file, str)
        ):
            problems.append(f"storage_data: {shown(name)} at {shown(index.get('offset'))} in {shown(file)}")
        elif not is_plain_name(file):
            problems.append(f"{name}: lies in {file!r}, and only files in the folder itself are read")
        elif info.get("transform_descriptors"):
            problems.append(
                f"{name}: was transformed by {shown(info.get('transform_descriptors'))}, which is not undone"
            )
        elif not is_count(begin) or not is_count(length) or begin + length > sizes.of(file):
            problems.append(f"{name}: bytes {shown(begin)} to +{shown(length)} of {file}, which has {sizes.of(file)}")
        elif place_of(name, offset) in out:
            problems.append(f"{name}: the chunk at {offset} lies in two places")
        else:
            out[place_of(name, offset)] = Extent(file, begin, length)
        if len(problems) >= MOST:
            break
    return out


def _contents(listed: Any, places: dict[str, Extent], problems: list[str]) -> Contents:
    tensors: dict[str, Stored] = {}
    chunks: dict[str, tuple[Chunk, ...]] = {}
    others: dict[str, Extent] = {}
    for name, what in (listed if isinstance(listed, dict) else {}).items():
        kind = kind_of(what)
        if not isinstance(name, str):
            problems.append(f"state_dict_metadata holds a {kind_of(name)}")
        elif kind == "BytesStorageMetadata" and place_of(name, None) in places:
            others[name] = places[place_of(name, None)]
        elif kind == "TensorStorageMetadata":
            found = _tensor(name, what, places, problems)
            if found is not None:
                tensors[name], chunks[name] = found
        else:
            problems.append(f"{name!r}: a {kind} that lies nowhere")
        if len(problems) >= MOST:
            break
    if not tensors:
        problems.append("it lists no tensor")
    return Contents(tensors, chunks, others)


def _tensor(
    name: str, what: Made, places: dict[str, Extent], problems: list[str]
) -> tuple[Stored, tuple[Chunk, ...]] | None:
    """One tensor; its chunks must fill it."""
    shape, rows, properties = _shape(what.get("size")), what.get("chunks"), what.get("properties")
    state = properties.state if isinstance(properties, Made) else None
    of = state[0] if isinstance(state, tuple) and state else None
    dtype = DTYPES.get(of.name) if isinstance(of, Name) and of.module == "torch" else None
    if dtype is None or shape is None or not isinstance(rows, list):
        problems.append(f"{name}: dtype {shown(of)}, size {shown(what.get('size'))}, chunks in a {kind_of(rows)}")
        return None
    out = []
    before = len(problems)
    for row in rows:
        offset, sizes = (_shape(row.get(key)) if isinstance(row, Made) else None for key in ("offsets", "sizes"))
        inside = offset is not None and sizes is not None and len(offset) == len(sizes) == len(shape)
        if offset is None or sizes is None or not inside or any(map(_beyond, offset, sizes, shape)):
            given = [shown(row.get(key)) for key in ("offsets", "sizes")] if isinstance(row, Made) else kind_of(row)
            problems.append(f"{name}: a chunk of offset and size {given} in {list(shape)}")
        elif 0 in sizes:
            continue  # what a rank with nothing to write left behind
        elif (where := places.get(place_of(name, offset))) is None:
            problems.append(f"{name}: the chunk at {list(offset)} lies nowhere")
        else:
            out.append(Chunk(Block(offset, sizes, 0), where))
        if len(problems) >= MOST:
            return None
    if len(problems) == before and not filled(shape, [chunk.block for chunk in out]):
        problems.append(f"{name}: its {len(out)} chunks do not fill {list(shape)} without gap or overlap")
    return Stored(shape, dtype), tuple(out)


def _beyond(offset: int, size: int, whole: int) -> bool:
    return offset + size > whole


def filled(shape: Shape, parts: Sequence[Block]) -> bool:
    """Whether blocks that lie in a tensor are all of it, each element once; in time linear in their number.

    Boxes fill a box just where the polynomials ``sum over boxes, product over dims, x[dim, begin] - x[dim, end]`` of
    both are equal. They are compared at a point that is drawn at random modulo a prime: who made the boxes does not
    know it, and polynomials that differ are equal there with a probability below 2**-54 (Schwartz and Zippel).
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
    """A ``torch.Size``, as DCP has it, or a tuple; None for anything else."""
    if isinstance(value, Made) and value.of == SIZE and len(value.args) == 1:
        value = value.args[0]
    good = isinstance(value, tuple) and len(value) <= DIMS and all(map(is_count, value))
    return value if good and math.prod(n for n in value if n) <= LARGEST else None


def shown(value: Any) -> str:
    """A value of a stranger in a message: never more than its own first part, since parts may be shared without end."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:80] if not isinstance(value, int) or -PRIME < value < PRIME else "a huge number"
    if isinstance(value, Made) and value.of == SIZE and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Name):
        return f"{value.module}.{value.name}"[:80]
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(n) if isinstance(n, str | int) else '...' for n in value[:8])}]"[:160]
    return f"a {kind_of(value)}"
