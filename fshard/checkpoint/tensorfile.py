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

from fshard.reading.files import File
from fshard.reading.texts import parse_json
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

START = 9
"""The bytes by which a file of the format is known: the length of the header, and the brace that opens it."""

DIMS = 64
"""The most dims of a tensor."""

LARGEST = 2**60
"""The most elements of a tensor and bytes of a file. It is below the prime by which Python hashes ints."""


@dataclass(frozen=True)
class TensorMeta:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored(TensorMeta):
    """A tensor in a file, from byte ``begin`` on."""

    begin: int

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.begin + self.nbytes


def write_header(tensors: Mapping[str, TensorMeta], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data of consecutive tensors. With larger elements first, every element is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, meta in tensors.items():
        offsets = [at, at + meta.nbytes]
        header[name] = {"dtype": NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": offsets}
        at += meta.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def is_start(start: bytes) -> bool:
    """Tell whether these are the first ``START`` bytes of a file of the format.

    >>> is_start(write_header({}, {})[:START]), is_start(b"\\x80\\x02}q\\x00.")
    (True, False)
    """
    return len(start) >= START and 2 <= int.from_bytes(start[:8], "little") <= LIMIT and start[8:START] == b"{"


def read_header(file: File) -> dict[str, Stored]:
    """The tensors of a file by name, in the order of their data, which are not read.

    Raises:
        DamagedError: the header breaks a rule of the format: the tensors must fill the file without gap or overlap.
    """
    header, base = _json(file)
    problems, found = [], {}
    for name, row in header.items():
        try:
            found[name] = _stored(row, base)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = base
    for name, stored in ordered.items():
        if stored.begin != at:
            kind = "overlaps the tensor before it" if stored.begin < at else "leaves a gap before it"
            problems.append(f"{name}: begins at byte {stored.begin}, not {at}: {kind}")
        at = max(at, stored.end)
    if not problems and at != file.size:
        problems.append(f"its tensors end at byte {at}, and the file at {file.size}")
    if problems:
        raise file.refuse(file.path, problems)
    return ordered


def _json(file: File) -> tuple[dict[str, Any], int]:
    """The rows of a header by tensor, without its metadata, and the byte after it."""
    start = file.read(0, min(8, file.size))
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if not 2 <= length <= min(LIMIT, file.size - 8):
        problem = f"its header of {length} bytes does not fit its {file.size} bytes, or the limit of {LIMIT} bytes"
        raise file.refuse(file.path, [problem])
    try:
        header = parse_json(file.text(8, 8 + length), SPACE)
    except ValueError as error:
        raise file.refuse(file.path, [f"its header is not JSON: {error}"]) from error
    if not isinstance(header, dict):
        raise file.refuse(file.path, [f"its header is a {type(header).__name__}, not an object"])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.refuse(file.path, ["its __metadata__ is not an object of strings"])
    return header, 8 + length


def _stored(row: Any, base: int) -> Stored:
    """The tensor of one row of a header; a ValueError says what is wrong with the row."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("not an object of dtype, shape and data_offsets")
    shape, offsets, dtype = row["shape"], row["data_offsets"], row["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    if not is_shape(shape):
        raise ValueError(f"shape {str(shape)[:80]} is not a list of sizes of a tensor below {LARGEST} elements")
    if not is_shape(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {str(offsets)[:80]} are not two positions")
    stored = Stored(tuple(shape), DTYPES[dtype], base + offsets[0])
    if stored.end != base + offsets[1]:
        raise ValueError(f"{dtype}{shape} takes {stored.nbytes} bytes, and has {offsets[1] - offsets[0]}")
    return stored


def is_shape(value: Any) -> bool:
    """Tell whether a JSON value is a list of at most ``DIMS`` sizes whose product is at most ``LARGEST``."""
    if not isinstance(value, list) or len(value) > DIMS or not all(is_count(n) for n in value):
        return False
    return bool(math.prod(n for n in value if n) <= LARGEST)


def is_count(value: Any) -> bool:
    """Tell whether a JSON value is an int from 0 to ``LARGEST``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
