"""One tensor as ``torch.save`` writes it: a zip archive of a small pickle and the tensor's bytes.

Only the directory and the pickle are read here. Nothing is decompressed: PyTorch does not compress.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.files import File
from fshard.checkpoint.tensorfile import DIMS, is_count
from fshard.interchange.pickles import PERSISTENT, CallRecord, GlobalName, read_pickle
from fshard.sharding.spec import Shape

SMALL = 1 << 16
"""The most bytes of an archive's directory and of its pickle; each takes some hundred for a tensor."""

END, END_64, LOCATOR, ENTRY, LOCAL = (
    struct.Struct("<4s4H2IH"),
    struct.Struct("<4sQ2H2I4Q"),
    struct.Struct("<4sIQI"),
    struct.Struct("<4s6H3I5H2I"),
    struct.Struct("<4s5H3I2H"),
)
"""Records of the zip format: the ends of the directory, the locator of the second, an entry, and a file's header."""

MOVED = 0xFFFFFFFF
"""Stands for a size or place of 64 bits that is in the extra field."""

REBUILD = {GlobalName("torch._utils", "_rebuild_tensor_v2"), GlobalName("torch._utils", "_rebuild_tensor_v3")}
"""The functions that make a tensor of a storage; the second one takes the dtype of an untyped storage."""

UNTYPED, HOOKS = GlobalName("torch.storage", "UntypedStorage"), GlobalName("collections", "OrderedDict")

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""The dtypes by name."""

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
"""The dtypes of typed storages."""


@dataclass(frozen=True)
class StridedData:
    """The elements of a tensor in a file: from byte ``begin`` on, ``strides`` elements apart along each dim."""

    begin: int
    strides: Shape

    def contiguous(self, shape: Shape) -> bool:
        """Whether the elements are in row-major order."""
        kept = [(size, stride) for size, stride in zip(shape, self.strides, strict=True) if size > 1]
        return all(stride == math.prod(n for n, _ in kept[at + 1 :]) for at, (_, stride) in enumerate(kept))


def find_tensor(file: File, begin: int, length: int) -> tuple[torch.dtype, Shape, StridedData]:
    """The dtype, the shape and the elements of the tensor in an archive, which is a part of a file.

    Raises:
        ValueError: the bytes are no archive of one tensor as ``torch.save`` writes it.
        CheckpointError, OSError: the file cannot be read.
    """
    members = _members(file, begin, length)
    at, end = members.get("data.pkl", (0, 0))
    if not at < end <= at + SMALL:
        raise ValueError(f"its pickle has {end - at} bytes, of at most {SMALL}")
    order = members.get("byteorder")
    if order is not None and bytes(file.read(order[0], min(order[1], order[0] + 9))) != b"little":
        raise ValueError("its bytes are not in little-endian order")
    made = read_pickle(file.read(at, end), _known)
    if not isinstance(made, CallRecord) or made.of not in REBUILD or len(made.args) < 6 or made.state is not None:
        raise ValueError("its pickle holds no plain tensor")
    storage, offset, shape, strides = made.args[:4]
    dtype, key, count = _storage(storage, made.args[6] if made.of.name.endswith("_v3") and len(made.args) > 6 else None)
    good = all(isinstance(row, tuple) and len(row) <= DIMS and all(map(is_count, row)) for row in (shape, strides))
    if not good or len(shape) != len(strides) or not is_count(offset):
        raise ValueError("its shape, strides or offset are invalid")
    low, high = members.get(f"data/{key}", (0, -1))
    if high - low != count * dtype.itemsize:
        raise ValueError(f"its storage of {count} elements of {dtype} has {high - low} bytes")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= count:
        raise ValueError(f"its last element is number {last} of a storage of {count}")
    return dtype, shape, StridedData(low + offset * dtype.itemsize, strides)


def _storage(made: Any, dtype: Any) -> tuple[torch.dtype, str, int]:
    """The dtype of a storage, its name in the archive, and its number of elements."""
    row = made.args[0] if isinstance(made, CallRecord) and made.of == PERSISTENT else None
    if not isinstance(row, tuple) or len(row) != 5 or row[0] != "storage" or not isinstance(row[1], GlobalName):
        raise ValueError("its storage is invalid")
    _, of, key, _, count = row
    known = STORAGES.get(of.name) if of.module == "torch" else None
    if of == UNTYPED and isinstance(dtype, GlobalName):
        known = DTYPES.get(dtype.name)
    if known is None or not isinstance(key, str) or not is_count(count):
        raise ValueError(f"its storage is of {of.module[:80]}.{of.name[:80]}")
    if of == UNTYPED:
        count = count // known.itemsize if count % known.itemsize == 0 else -1
    return known, key, count


def _known(name: GlobalName) -> bool:
    """Whether the pickle of a tensor may contain a name."""
    if name.module == "torch":
        return name.name in STORAGES or name.name in DTYPES
    return name in REBUILD or name in (UNTYPED, HOOKS)


def _members(file: File, begin: int, length: int) -> dict[str, tuple[int, int]]:
    """The byte range of each file in an archive, by its name without the archive's own."""
    at, size = _directory(file, begin, length)
    text = bytes(file.read(begin + at, begin + at + size))
    out: dict[str, tuple[int, int]] = {}
    place = 0
    while place < size:
        if size - place < ENTRY.size:
            raise ValueError("its directory ends within an entry")
        row = ENTRY.unpack_from(text, place)
        method, (packed, unpacked, names, extras, comment), where = row[4], row[8:13], row[16]
        head = place + ENTRY.size
        name = text[head : head + names].decode(errors="replace").partition("/")[2]
        sizes = [packed, unpacked, where]
        if MOVED in sizes:
            sizes = _extra(text[head + names : head + names + extras], sizes)
        if row[0] != b"PK\1\2" or method or sizes[0] != sizes[1] or name in out:
            raise ValueError(f"{name[:80]!r} in it is compressed, or there twice")
        out[name] = _data(file, begin, at, sizes[2], sizes[1])
        place = head + names + extras + comment
    return out


def _directory(file: File, begin: int, length: int) -> tuple[int, int]:
    """The first byte of an archive's directory, and its length."""
    end = begin + length
    if length < END.size:
        raise ValueError(f"its {length} bytes are no archive")
    row = END.unpack(file.read(end - END.size, end))
    size, at = row[5], row[6]
    if row[0] != b"PK\5\6":
        raise ValueError("it has no end of a directory where its own end is")
    if length >= END.size + LOCATOR.size:
        there = LOCATOR.unpack(file.read(end - END.size - LOCATOR.size, end - END.size))
        if there[0] == b"PK\6\7":
            if there[2] > length - END_64.size:
                raise ValueError("its directory ends outside of it")
            more = END_64.unpack(file.read(begin + there[2], begin + there[2] + END_64.size))
            size, at = more[8], more[9]
    if size > SMALL or at > length or size > length - at:
        raise ValueError(f"its directory of {size} bytes at byte {at} does not fit, or is over {SMALL} bytes")
    return at, size


def _extra(text: bytes, sizes: list[int]) -> list[int]:
    """Sizes and a place, with values of 64 bits from the extra field, where the unpacked size comes first."""
    at = 0
    while at + 4 <= len(text):
        kind, length = struct.unpack_from("<2H", text, at)
        if kind == 1:
            row = text[at + 4 : at + 4 + length]
            longs = iter(struct.unpack(f"<{len(row) // 8}Q", row[: len(row) // 8 * 8]))
            unpacked, packed, where = (next(longs, -1) if n == MOVED else n for n in (sizes[1], sizes[0], sizes[2]))
            return [packed, unpacked, where]
        at += 4 + length
    raise ValueError("a file in it has no size")


def _data(file: File, begin: int, end: int, where: int, size: int) -> tuple[int, int]:
    """The byte range of a file in an archive, which lies before the directory."""
    if not 0 <= where <= end - LOCAL.size:
        raise ValueError(f"a file in it begins at byte {where}")
    row = LOCAL.unpack(file.read(begin + where, begin + where + LOCAL.size))
    low = where + LOCAL.size + row[9] + row[10]
    if row[0] != b"PK\3\4" or not 0 <= size <= end - low:
        raise ValueError(f"a file in it has {size} bytes from byte {low} on")
    return begin + low, begin + low + size


def read_strided(file: File, data: StridedData, shape: Shape, dtype: torch.dtype) -> Tensor:
    """All of a tensor that is not in row-major order. It takes as much memory as in the file."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, data.strides, strict=True))
    buffer = file.read(data.begin, data.begin + count * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, data.strides)
