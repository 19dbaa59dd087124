"""Small messages to all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.runtime.comm.communicator import Communicator


def exchange(comm: Communicator, row: Tensor) -> Tensor:
    """The rows of all ranks of a control communicator, ``(ranks, n)``: small, synchronous, the same on all of them."""
    if comm.size == 1:
        return row.view(1, -1)
    rows = row.new_empty(comm.size * row.numel())
    comm.all_gather(rows, row.contiguous()).wait()
    return rows.view(comm.size, row.numel())


def exchange_text(comm: Communicator, text: str, width: int = 2048) -> Sequence[str]:
    """The texts of all ranks, each cut to ``width`` bytes."""
    data = text.encode()[:width].ljust(width, b"\0")
    rows = exchange(comm, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


SMALL = 1024
"""Bytes that the first message of ``exchange_bytes`` holds."""


def exchange_bytes(comm: Communicator, data: bytes) -> Sequence[bytes]:
    """The bytes that each rank brings, of any lengths: one all-gather, and another one where any are long."""
    head = len(data).to_bytes(8, "little") + data[: SMALL - 8]
    first = [bytes(row.tolist()) for row in exchange(comm, _padded(head, SMALL))]
    sizes = [int.from_bytes(row[:8], "little") for row in first]
    found = [row[8 : 8 + size] for row, size in zip(first, sizes, strict=True)]
    rest = max(sizes) - (SMALL - 8)
    if rest > 0:
        more = exchange(comm, _padded(data[SMALL - 8 :], rest))
        found = [
            part + bytes(row[: max(0, size - len(part))].tolist())
            for part, row, size in zip(found, more, sizes, strict=True)
        ]
    return found


def _padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
