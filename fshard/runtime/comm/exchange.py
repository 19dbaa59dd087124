"""Small messages from each rank to all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.runtime.comm.communicator import Communicator


def exchange(comm: Communicator, row: Tensor) -> Tensor:
    """The rows of all ranks of a control communicator, ``(ranks, n)``. Synchronous; the result is the same on all."""
    if comm.size == 1:
        return row.view(1, -1)
    rows = row.new_empty(comm.size * row.numel())
    comm.all_gather(rows, row.contiguous()).wait()
    return rows.view(comm.size, row.numel())


SMALL = 1024
"""Bytes that the first message of ``exchange_bytes`` holds."""


def exchange_bytes(comm: Communicator, data: bytes) -> Sequence[bytes]:
    """The bytes of each rank, of any lengths: one all-gather, and a second one if any rank's are long."""
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


def exchange_text(comm: Communicator, text: str, width: int = 2048) -> Sequence[str]:
    """The texts of all ranks, each cut to ``width`` bytes."""
    return [row.decode(errors="replace") for row in exchange_bytes(comm, text.encode()[:width])]


def _padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
