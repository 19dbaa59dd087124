"""One tensor as ``torch.save`` writes it: a zip archive of a small pickle and the tensor's bytes.

Only the directory and the pickle are read here. Nothing is decompressed: PyTorch does not compress.
"""

import math
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.tensorfile import DIMS, is_count
from fshard.interchange.pickles import PERSISTENT, CallRecord, GlobalName, read_pickle
from fshard.reading.files import File
from fshard.sharding.spec import Shape

SMALL = 1 << 17
"""The most bytes of an archive's directory and of its pickle; each takes some hundred for a tensor."""

HEAD = struct.Struct("<4s22x2H")
"""The header of a file in an archive: its signature, and the lengths of the name and of the extra field behind it."""

REBUILD = {GlobalName("torch._utils", "_rebuild_tensor_v2"), GlobalName("torch._utils", "_rebuild_tensor_v3")}
"""The functions that make a tensor of a storage; the second one takes the dtype of an untyped storage."""

UNTYPED, HOOKS = GlobalName("torch.storage", "UntypedStorage"), GlobalName("collections", "OrderedDict")

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""The dtypes by name."""

KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
STORAGES: dict[str, torch.dtype] = {
    **{f"{kind}Storage": vars(torch)[f"{kind}Tensor"].dtype for kind in KINDS},
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
"""The dtypes of typed storages."""

KNOWN = REBUILD | {UNTYPED, HOOKS} | {GlobalName("torch", name) for name in (*STORAGES, *DTYPES)}
"""The names that the pickle of a tensor may contain."""


@dataclass(frozen=True)
class StridedData:
    """The elements of a tensor in a file: from byte ``begin`` on, ``strides`` elements apart along each dim."""

    begin: int
    strides: Shape

    def contiguous(self, shape: Shape) -> bool:
        """Tell whether the elements are in row-major order."""
        kept = [(size, stride) for size, stride in zip(shape, self.strides, strict=True) if size > 1]
        return all(stride == math.prod(n for n, _ in kept[at + 1 :]) for at, (_, stride) in enumerate(kept))


def find_tensor(file: File, begin: int, length: int) -> tuple[torch.dtype, Shape, StridedData]:
    """The dtype, the shape and the elements of the tensor in an archive, which is a part of a file.

    A ValueError says why the bytes are no archive of one tensor as ``torch.save`` writes it.
    """
    members = _members(file, begin, length)
    at, end = members.get("data.pkl", (0, 0))
    if not at < end <= at + SMALL:
        raise ValueError(f"its pickle has {end - at} bytes, of at most {SMALL}")
    order = members.get("byteorder")
    if order is not None and bytes(file.read(order[0], min(order[1], order[0] + 9))) != b"little":
        raise ValueError("its bytes are not in little-endian order")
    made = read_pickle(file.read(at, end), KNOWN.__contains__)
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


class _Window:
    """A part of a file for ``zipfile``, which reads at most ``SMALL`` bytes of it at a time."""

    def __init__(self, file: File, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a byte."""
        self.at = at + (0, self.at, self.length)[whence]
        if not 0 <= self.at <= self.length:
            raise ValueError(f"its directory points to byte {self.at} of {self.length}")
        return self.at

    def tell(self) -> int:
        """The next byte."""
        return self.at

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        begin, self.at = self.at, self.length if count < 0 else min(self.at + count, self.length)
        if self.at - begin > SMALL:
            raise ValueError(f"its directory has {self.at - begin} bytes, of at most {SMALL}")
        return bytes(self.file.read(self.begin + begin, self.begin + self.at))


def _members(file: File, begin: int, length: int) -> dict[str, tuple[int, int]]:
    """The byte range of each file in an archive, by its name without the archive's own."""
    window = _Window(file, begin, length)
    try:
        entries = zipfile.ZipFile(window).infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(f"it is not an archive: {error}") from error
    out: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.filename.partition("/")[2]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or name in out:
            raise ValueError(f"{name[:80]!r} in it is compressed, or there twice")
        window.seek(entry.header_offset)
        head = window.read(HEAD.size)
        names, extras = HEAD.unpack(head)[1:] if len(head) == HEAD.size else (0, 0)
        low = entry.header_offset + HEAD.size + names + extras
        if not head.startswith(b"PK\3\4") or low + entry.file_size > length:
            raise ValueError(f"{name[:80]!r} in it has {entry.file_size} bytes from byte {low} on")
        out[name] = (begin + low, begin + low + entry.file_size)
    return out


def read_strided(file: File, data: StridedData, shape: Shape, dtype: torch.dtype) -> Tensor:
    """All of a tensor that is not in row-major order. It takes as much memory as in the file."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, data.strides, strict=True))
    buffer = file.read(data.begin, data.begin + count * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, data.strides)
