"""The manifest: what a checkpoint holds, as JSON that is sealed by its own SHA-256 and read as untrusted input.

A parsed manifest is consistent: file names are plain names, every extent lies in its file, no two extents share a byte
or an element, and the extents of a tensor cover it. So a reader allocates memory by the plan and reads inside of files,
whatever the manifest claims.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from fshard.checkpoint.tensorfile import DTYPES, NAMES, TensorMeta, is_count, is_shape
from fshard.errors import MOST, CheckpointError
from fshard.reading.files import damaged
from fshard.reading.texts import check_bounds, parse_json
from fshard.sharding.layout import Piece

FORMAT = "fshard-checkpoint"
VERSION = 3
"""The newest format that this code reads. It writes 3, which added ``states``, where there are several; else 2, which
added ``run``, or 1 without a run."""
CHUNK = 1 << 20
"""Bytes of a file that share a SHA-256."""
LARGEST_CHUNK = 16 * CHUNK
"""The largest chunk that is read, since a thread allocates memory for it."""
LIMIT = 1 << 30
"""Bytes of a manifest, at most."""
AXES = 64
"""Axes of a mesh, at most."""
RUN = re.compile(r"[0-9a-f]{16}")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,80}\.safetensors")


@dataclass(frozen=True)
class FileInfo:
    """A file of tensors: its size, and the SHA-256 of each ``chunk`` bytes of it in hex.

    A file's own hash is the hash of its chunks' digests (a Merkle tree of two levels): data are hashed once, and a part
    of a file is verified without reading the rest.
    """

    size: int
    chunks: tuple[str, ...]
    chunk: int = CHUNK

    @property
    def sha256(self) -> str:
        """The SHA-256 over the digests of the chunks, in hex."""
        return hashlib.sha256(bytes.fromhex("".join(self.chunks))).hexdigest()

    def row(self) -> dict[str, Any]:
        """The file as JSON; ``read_file`` is the inverse."""
        return {"size": self.size, "chunk": self.chunk, "sha256": self.sha256, "chunks": list(self.chunks)}


@dataclass(frozen=True)
class Extent:
    """A piece of a tensor, stored in a file from byte ``at`` on."""

    file: str
    at: int
    piece: Piece

    def row(self) -> list[Any]:
        """The extent as JSON: file, byte, offset and shape of the box, range in it; ``read_extent`` is the inverse."""
        piece = self.piece
        return [self.file, self.at, list(piece.offset), list(piece.shape), piece.start, piece.stop]


@dataclass(frozen=True)
class TensorInfo(TensorMeta):
    """A whole tensor: shape, dtype, how the mesh cut it, and where its pieces are stored."""

    spec: str
    extents: tuple[Extent, ...]

    def __str__(self) -> str:
        """``F32[4, 8]``."""
        return f"{NAMES[self.dtype]}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    ``data`` and ``metadata`` are the user's JSON, ``schedule`` the hash of the train step's schedule. ``run`` is None
    for a checkpoint of no run, or written before there were ids. ``states`` names the states, where there are several:
    the names of tensors and scalars begin with them. ``seal``, the manifest's own SHA-256, is empty before the manifest
    is written.
    """

    step: int
    scalars: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, FileInfo]
    mesh: Mapping[str, int] = field(default_factory=dict)
    data: Any = None
    metadata: Any = None
    schedule: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    states: tuple[str, ...] = ()
    seal: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(info.size for info in self.files.values())

    @property
    def run_id(self) -> str:
        """The id of the run, or without one the beginning of the seal."""
        return self.run or self.seal[:16]

    def of(self, state: str) -> "Manifest":
        """The manifest of one of several states, with that state's own names."""
        start = f"{state}."
        tensors = {name.removeprefix(start): info for name, info in self.tensors.items() if name.startswith(start)}
        values = {name.removeprefix(start): value for name, value in self.scalars.items() if name.startswith(start)}
        return replace(self, step=values["step"], tensors=tensors, scalars=values, states=())

    def dump(self) -> bytes:
        """The manifest as sealed JSON text; raises a CheckpointError if it exceeds the reader's bounds."""
        body = {
            "format": FORMAT,
            "version": VERSION if self.states else 1 if self.run is None else 2,
            "step": self.step,
            "scalars": dict(self.scalars),
            "mesh": dict(self.mesh),
            "data": self.data,
            "metadata": self.metadata,
            "schedule": self.schedule,
            "versions": dict(self.versions),
            **({} if self.run is None else {"run": self.run}),
            **({"states": list(self.states)} if self.states else {}),
            "files": {name: info.row() for name, info in self.files.items()},
            "tensors": {
                name: {
                    "dtype": NAMES[info.dtype],
                    "shape": list(info.shape),
                    "spec": info.spec,
                    "extents": [extent.row() for extent in info.extents],
                }
                for name, info in self.tensors.items()
            },
        }
        text = _text(body)
        try:
            check_bounds(text)
        except ValueError as error:
            remedy = "pass less as data= and metadata="
            raise CheckpointError(f"the manifest is too large to be read again: {error}; {remedy}") from error
        seal = hashlib.sha256(text).hexdigest()
        return text[:-1] + f',"sha256":"{seal}"}}\n'.encode()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def parse(path: str, text: bytes) -> Manifest:
    """The manifest in a text that was read from ``path``.

    A CheckpointError says that it is none, or of a newer format; a DamagedError, that it was changed after writing.
    """
    if len(text) > LIMIT:
        raise damaged(path, [f"it has {len(text)} bytes, and a manifest has at most {LIMIT}"])
    try:
        body = parse_json(text)
    except ValueError as error:
        raise damaged(path, [f"it is not JSON: {str(error)[:200]}"]) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise foreign(path, f'its "format" is not "{FORMAT}"')
    version = body.get("version")
    if not is_count(version) or not version:
        raise damaged(path, [f"its version is {version!r}"])
    if version > VERSION:
        known = f"this fshard reads formats up to {VERSION}"
        raise CheckpointError(f"{path} has format {version}, and {known}: update fshard to read it")
    seal = body.pop("sha256", None)
    found = hashlib.sha256(_text(body)).hexdigest()
    if seal != found:
        raise damaged(path, [f"its SHA-256 is {found}, and it says {str(seal)[:80]}: it was changed after writing"])
    return replace(_read(path, body), seal=found)


KEYS: dict[str, Callable[[Any], bool]] = {
    "step": is_count,
    "scalars": lambda value: isinstance(value, dict) and not any(isinstance(v, dict | list) for v in value.values()),
    "mesh": lambda value: isinstance(value, dict) and len(value) <= AXES and all(map(is_count, value.values())),
    "data": lambda value: True,
    "metadata": lambda value: True,
    "schedule": lambda value: value is None or isinstance(value, str),
    "run": lambda value: value is None or (isinstance(value, str) and RUN.fullmatch(value) is not None),
    "states": lambda value: (
        isinstance(value, list)
        and all(isinstance(name, str) and name.isidentifier() for name in value)
        and len(set(value)) == len(value)
    ),
    "versions": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "files": lambda value: isinstance(value, dict),
    "tensors": lambda value: isinstance(value, dict),
}
"""The check of each part of a manifest."""


def _read(path: str, body: Mapping[str, Any]) -> Manifest:
    """A consistent manifest of parts of the right types."""
    parts = {"run": None, "states": []} | {
        name: value for name, value in body.items() if name not in ("format", "version")
    }
    problems = [f"{name}: missing" for name in KEYS if name not in parts]
    problems += [f"{name[:80]!r}: unknown" for name in parts if name not in KEYS]
    problems += [f"{name}: {str(parts[name])[:80]}" for name in KEYS if name in parts and not KEYS[name](parts[name])]
    if problems:
        raise damaged(path, problems)
    read: dict[str, dict[str, Any]] = {"files": {}, "tensors": {}}
    for what, reader in (("files", read_file), ("tensors", _tensor)):
        for name, row in parts[what].items():
            try:
                read[what][name] = reader(name, row)
            except ValueError as error:
                problems.append(f"{what}[{name[:200]!r}]{error}")
    manifest = Manifest(**{**parts, **read, "states": tuple(parts["states"])})
    if problems := problems or list(islice(inconsistent(manifest), MOST)):
        raise damaged(path, problems)
    return manifest


def read_file(name: str, row: Any) -> FileInfo:
    """A row of ``files``; a ValueError says what is wrong with it."""
    if not FILE_NAME.fullmatch(name):
        raise ValueError(": not a plain file name, such as rank-00000-000.safetensors")
    if not isinstance(row, dict) or set(row) != {"size", "chunk", "sha256", "chunks"}:
        raise ValueError(": not an object of size, chunk, sha256 and chunks")
    size, chunk, chunks = row["size"], row["chunk"], row["chunks"]
    good = is_count(size) and is_count(chunk) and 64 <= chunk <= LARGEST_CHUNK and not chunk % 64
    if not good or not isinstance(chunks, list):
        raise ValueError(f": a size of {str(size)[:30]} bytes in chunks of {str(chunk)[:30]}")
    if len(chunks) != -(-size // chunk) or not all(isinstance(c, str) and SHA256.fullmatch(c) for c in chunks):
        raise ValueError(f": {size} bytes need {-(-size // chunk)} SHA-256 of chunks, and it has {len(chunks)}")
    info = FileInfo(size, tuple(chunks), chunk)
    if row["sha256"] != info.sha256:
        raise ValueError(": its SHA-256 is not that of its chunks")
    return info


def _tensor(name: str, row: Any) -> TensorInfo:
    """A row of ``tensors``; a ValueError says what is wrong with it."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "spec", "extents"}:
        raise ValueError(": not an object of dtype, shape, spec and extents")
    dtype, shape, spec, rows = row["dtype"], row["shape"], row["spec"], row["extents"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f": dtype {str(dtype)[:80]!r}, which is none of {', '.join(DTYPES)}")
    if not is_shape(shape) or not isinstance(spec, str) or not isinstance(rows, list):
        raise ValueError(f": shape {str(shape)[:80]}, its spec or its extents are invalid")
    return TensorInfo(tuple(shape), DTYPES[dtype], spec, tuple(read_extent(n, extent) for n, extent in enumerate(rows)))


def read_extent(number: int, row: Any) -> Extent:
    """The extent in row ``number`` of a tensor; a ValueError says what is wrong with the row."""
    match row:
        case [str(file), at, list(offset), list(shape), start, stop]:
            counts = all(map(is_count, (at, start, stop, *offset)))
            if counts and is_shape(shape) and len(offset) == len(shape):
                return Extent(file, at, Piece(tuple(offset), tuple(shape), start, stop))
    raise ValueError(f".extents[{number}]: not [file, byte, offset, shape, start, stop]")


def inconsistent(manifest: Manifest) -> Iterable[str]:
    """Contradictions in a manifest whose values have the right types."""
    if manifest.scalars.get("step") != manifest.step:
        yield f"step: {manifest.step}, and {str(manifest.scalars.get('step'))[:80]} among the scalars"
    for name in (*manifest.tensors, *manifest.scalars) if manifest.states else ():
        if name != "step" and name.partition(".")[0] not in manifest.states:
            yield f"{name[:200]!r}: belongs to none of the states {', '.join(manifest.states)[:200]}"
    for state in manifest.states:
        if not is_count(manifest.scalars.get(f"{state}.step")):
            yield f"scalars: no step of the state {state[:80]!r}"
    taken: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for name, info in manifest.tensors.items():
        for number, extent in enumerate(info.extents):
            where = f"tensors[{name[:200]!r}].extents[{number}]"
            begin, end = extent.at, extent.at + extent.piece.numel * info.dtype.itemsize
            if extent.file not in taken:
                yield f"{where}: the file {extent.file[:80]!r} is not among the files"
            elif not begin < end <= manifest.files[extent.file].size or begin % info.dtype.itemsize:
                yield f"{where}: bytes {begin} to {end} of a file of {manifest.files[extent.file].size} bytes"
            else:
                taken[extent.file].append((begin, end, where))
        yield from _uncovered(name, info)
    for file, spans in taken.items():
        spans.sort()
        for (_, end, one), (begin, _, other) in zip(spans, spans[1:], strict=False):
            if begin < end:
                yield f"{one} and {other} both claim byte {begin} of {file}"


def _uncovered(name: str, info: TensorInfo) -> Iterable[str]:
    """Say where the extents of a tensor do not hold each of its elements exactly once."""
    where, shape = f"tensors[{name[:200]!r}]", info.shape
    boxes: dict[str, list[Piece]] = {}  # by text, whose hash is random: chosen tuples of ints can all collide
    for extent in info.extents:
        boxes.setdefault(str(extent.piece.offset), []).append(extent.piece)
    sizes = list({str(extent.piece.shape): extent.piece.shape for extent in info.extents}.values())
    if not info.extents:
        if math.prod(shape):
            yield f"{where}: no extents for its {math.prod(shape)} elements"
        return
    box = sizes[0]
    if len(sizes) > 1 or len(box) != len(shape) or any(b == 0 or n % b for n, b in zip(shape, box, strict=True)):
        yield f"{where}: boxes {sorted(sizes)[:3]} do not divide its shape {list(shape)} evenly"
        return
    for pieces in boxes.values():
        offset = pieces[0].offset
        if any(o % b or o + b > n for o, b, n in zip(offset, box, shape, strict=True)):
            yield f"{where}: a box of shape {list(box)} at {list(offset)} is not one of the boxes of {list(shape)}"
        at = 0
        for piece in sorted(pieces, key=lambda piece: piece.start):
            if piece.start != at or piece.stop <= at:
                kind = "claimed twice" if piece.start < at else "missing"
                yield f"{where}: elements {min(at, piece.start)} to {max(at, piece.start)} of the box at " + (
                    f"{list(offset)} are {kind}"
                )
            at = max(at, piece.stop)
        if at != math.prod(box):
            yield f"{where}: extents end at element {at} of the {math.prod(box)} of the box at {list(offset)}"
    count = math.prod(n // b for n, b in zip(shape, box, strict=True))
    if len(boxes) != count:
        yield f"{where}: {len(boxes)} of its {count} boxes are there"


def foreign(path: str, what: str) -> CheckpointError:
    """A file or folder that fshard did not write."""
    return CheckpointError(
        f"{path} is not a checkpoint of fshard: {what}. Give the folder that fs.Checkpointer wrote to."
    )


def empty(path: str) -> CheckpointError:
    """A folder without checkpoints."""
    return CheckpointError(
        f"{path} holds no checkpoint: check the path, or start with fs.init_state(plan, opt) where latest() is None"
    )


def other_folder(rank: int, path: str, first: str, name: str) -> CheckpointError:
    """A rank that sees another folder than rank 0."""
    return CheckpointError(
        f"rank {rank}: its folder {path} holds no {name}, which is in rank 0's folder {first}: give all ranks one "
        f"folder, on a file system that all of them see"
    )
