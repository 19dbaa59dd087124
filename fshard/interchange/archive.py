"""One tensor as ``torch.save`` wrote it: a zip archive of a small pickle and the tensor's bytes, of which only the
directory and the pickle are read here. Nothing is unpacked: what is compressed was not written by PyTorch.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.files import File
from fshard.checkpoint.tensorfile import DIMS, is_count
from fshard.interchange.pickles import PERSISTENT, Made, Name, read_pickle
from fshard.sharding.spec import Shape

SMALL = 1 << 16
"""Bytes of the directory of an archive, and of its pickle, at most; both take some hundred for a tensor."""

END, END_64, LOCATOR, ENTRY, LOCAL = (
    struct.Struct("<4s4H2IH"),
    struct.Struct("<4sQ2H2I4Q"),
    struct.Struct("<4sIQI"),
    struct.Struct("<4s6H3I5H2I"),
    struct.Struct("<4s5H3I2H"),
)
"""Records of the zip format: ends of the directory, what points to one, a file in it, and what is before its data."""

MOVED = 0xFFFFFFFF
"""A size or place that is in the extra field instead, where it has 64 bits."""

REBUILD = {Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3")}
"""What makes a tensor of a storage; the second one is told the dtype, which its storage does not have."""

UNTYPED, HOOKS = Name("torch.storage", "UntypedStorage"), Name("collections", "OrderedDict")

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""The dtypes by their names in torch."""

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
"""The dtype of each of the storages that have one."""


@dataclass(frozen=True)
class Placed:
    """Where the elements of a tensor lie: from byte ``begin`` of a file on, ``strides`` elements apart along dims."""

    begin: int
    strides: Shape

    def contiguous(self, shape: Shape) -> bool:
        """Whether they lie in row-major order."""
        kept = [(size, stride) for size, stride in zip(shape, self.strides, strict=True) if size > 1]
        return all(stride == math.prod(n for n, _ in kept[at + 1 :]) for at, (_, stride) in enumerate(kept))


def find_tensor(file: File, begin: int, length: int) -> tuple[torch.dtype, Shape, Placed]:
    """The dtype and the shape of the tensor in an archive, and where its elements lie.

    Args:
        file: the file that the archive is a part of.
        begin: the archive's first byte.
        length: its bytes.

    Raises:
        ValueError: it is no archive of one tensor as ``torch.save`` writes it.
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
    if not isinstance(made, Made) or made.of not in REBUILD or len(made.args) < 6 or made.state is not None:
        raise ValueError("its pickle holds no plain tensor")
    storage, offset, shape, strides = made.args[:4]
    dtype, key, count = _storage(storage, made.args[6] if made.of.name.endswith("_v3") and len(made.args) > 6 else None)
    good = all(isinstance(row, tuple) and len(row) <= DIMS and all(map(is_count, row)) for row in (shape, strides))
    if not good or len(shape) != len(strides) or not is_count(offset):
        raise ValueError("its shape, strides or offset are none")
    low, high = members.get(f"data/{key}", (0, -1))
    if high - low != count * dtype.itemsize:
        raise ValueError(f"its storage of {count} elements of {dtype} has {high - low} bytes")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= count:
        raise ValueError(f"its last element is number {last} of a storage of {count}")
    return dtype, shape, Placed(low + offset * dtype.itemsize, strides)


def _storage(made: Any, dtype: Any) -> tuple[torch.dtype, str, int]:
    """The dtype of a storage, its name in the archive, and its elements."""
    row = made.args[0] if isinstance(made, Made) and made.of == PERSISTENT else None
    if not isinstance(row, tuple) or len(row) != 5 or row[0] != "storage" or not isinstance(row[1], Name):
        raise ValueError("its storage is none")
    _, of, key, _, count = row
    known = STORAGES.get(of.name) if of.module == "torch" else None
    if of == UNTYPED and isinstance(dtype, Name):
        known = DTYPES.get(dtype.name)
    if known is None or not isinstance(key, str) or not is_count(count):
        raise ValueError(f"its storage is of {of.module[:80]}.{of.name[:80]}")
    if of == UNTYPED:
        count = count // known.itemsize if count % known.itemsize == 0 else -1
    return known, key, count


def _known(name: Name) -> bool:
    """Whether the pickle of a tensor may mention a name."""
    if name.module == "torch":
        return name.name in STORAGES or name.name in DTYPES
    return name in REBUILD or name in (UNTYPED, HOOKS)


def _members(file: File, begin: int, length: int) -> dict[str, tuple[int, int]]:
    """The first and one past the last byte of each file of an archive, by the name after the archive's own."""
    at, size = _directory(file, begin, length)
    text = bytes(file.read(begin + at, begin + at + size))
    out: dict[str, tuple[int, int]] = {}
    place = 0
    while place < size:
        if size - place < ENTRY.size:
            raise ValueError("its directory ends within an entry")
        row = ENTRY.unpack_from(text, place)
        method, packed, unpacked, names, extras, comment, where = (
            row[4],
            row[8],
            row[9],
            row[10],
            row[11],
            row[12],
            row[16],
        )
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
    """Where the directory of an archive begins, and its bytes."""
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
    """Sizes and a place, those of 64 bits from the extra field, in the order unpacked, packed, place."""
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
    """The bytes of a file in an archive, which lie before its directory."""
    if not 0 <= where <= end - LOCAL.size:
        raise ValueError(f"a file in it begins at byte {where}")
    row = LOCAL.unpack(file.read(begin + where, begin + where + LOCAL.size))
    low = where + LOCAL.size + row[9] + row[10]
    if row[0] != b"PK\3\4" or not 0 <= size <= end - low:
        raise ValueError(f"a file in it has {size} bytes from byte {low} on")
    return begin + low, begin + low + size


def strided(file: File, placed: Placed, shape: Shape, dtype: torch.dtype) -> Tensor:
    """All of a tensor that does not lie in row-major order. It takes no more memory than its bytes in the file."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, placed.strides, strict=True))
    data = file.read(placed.begin, placed.begin + count * dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, placed.strides)
