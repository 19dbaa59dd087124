"""The safetensors format: a length, a JSON header, and the tensors one after the other.

The safetensors library is not used: a checkpoint is hashed chunk by chunk while it is written and read, and an error
must name the path and the wrong number. Each reads the files of the other (``tests/checkpoint/test_format.py``).
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fshard.checkpoint.files import File, Refusal
from fshard.checkpoint.problems import damaged
from fshard.checkpoint.strict_json import parse_json
from fshard.sharding.spec import Shape

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name of each dtype."""

DTYPES = {name: dtype for dtype, name in NAMES.items()}

ALIGN = 64
"""The data of a file begin at a multiple of this many bytes."""

LIMIT = 100_000_000
"""The most bytes of a header: the limit of the safetensors library."""

SPACE = 256 << 20
"""The most bytes of memory for the JSON of a header: that of some 200,000 tensors."""

DIMS = 64
"""The most dims of a tensor."""

LARGEST = 2**60
"""The most elements of a tensor and bytes of a file. It is below the prime by which Python hashes ints."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the bytes ``begin`` to ``end`` of a file."""

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


def write_header(tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data of consecutive tensors. With larger elements first, every element is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def header_length(path: str, start: bytes, size: int, refuse: Refusal = damaged) -> int:
    """The number of bytes before the data of a file, from its first 8 bytes and its size."""
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if len(start) < 8 or not 2 <= length <= min(LIMIT, size - 8):
        raise refuse(
            path, [f"its header of {length} bytes does not fit its {size} bytes, or the limit of {LIMIT} bytes"]
        )
    return 8 + int(length)


def header_of(file: File) -> tuple[dict[str, Stored], dict[str, str]]:
    """The header of an open file, as from ``read_header``. Data are not read."""
    start = bytes(file.read(0, min(8, file.size)))
    length = header_length(file.path, start, file.size, file.refuse)
    return read_header(file.path, start + file.text(8, length), file.size, file.refuse)


def read_header(
    path: str, text: bytes, size: int, refuse: Refusal = damaged
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file by name, in the order of their data, and the header's metadata.

    Args:
        path: the file's path, for errors.
        text: the file's first bytes, up to its data.
        size: the bytes of the whole file.
        refuse: makes the error for problems.

    Raises:
        DamagedError: the header breaks a rule of the format: the tensors must fill the file without gap or overlap.
    """
    try:
        header = parse_json(text[8:], SPACE)
    except ValueError as error:
        raise refuse(path, [f"its header is no JSON: {error}"]) from error
    if not isinstance(header, dict):
        raise refuse(path, [f"its header is a {type(header).__name__}, not an object"])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse(path, ["its __metadata__ is no object of strings"])
    problems: list[str] = []
    found = {name: stored for name, row in header.items() if (stored := _stored(name, row, len(text), problems))}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = len(text)
    for name, stored in ordered.items():
        if stored.begin != at:
            kind = "overlaps the tensor before it" if stored.begin < at else "leaves a gap before it"
            problems.append(f"{name}: begins at byte {stored.begin}, not {at}: {kind}")
        at = max(at, stored.end)
    if not problems and at != size:
        problems.append(f"its tensors end at byte {at}, and the file at {size}")
    if problems:
        raise refuse(path, problems)
    return ordered, metadata


def _stored(name: str, row: Any, base: int, problems: list[str]) -> Stored | None:
    """The tensor of one row of a header; None if a problem was added."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        problems.append(f"{name}: not an object of dtype, shape and data_offsets")
        return None
    shape, offsets, dtype = row["shape"], row["data_offsets"], row["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.append(f"{name}: dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    elif not is_shape(shape):
        problems.append(f"{name}: shape {str(shape)[:80]} is no list of sizes of a tensor below {LARGEST} elements")
    elif not is_shape(offsets) or len(offsets) != 2:
        problems.append(f"{name}: data_offsets {str(offsets)[:80]} are not two positions")
    elif offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        need = math.prod(shape) * DTYPES[dtype].itemsize
        problems.append(f"{name}: {dtype}{shape} takes {need} bytes, and has {offsets[1] - offsets[0]}")
    else:
        return Stored(DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])
    return None


def is_shape(value: Any) -> bool:
    """Whether a JSON value is a list of at most ``DIMS`` sizes whose product is at most ``LARGEST``."""
    if not isinstance(value, list) or len(value) > DIMS or not all(is_count(n) for n in value):
        return False
    return bool(math.prod(n for n in value if n) <= LARGEST)


def is_count(value: Any) -> bool:
    """Whether a JSON value is an int from 0 to ``LARGEST``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
