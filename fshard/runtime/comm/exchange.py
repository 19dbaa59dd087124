"""Small messages to all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.runtime.comm.lanes import Lane


def exchange(lane: Lane, row: Tensor) -> Tensor:
    """The rows of all ranks of a control lane, ``(ranks, n)``: small, synchronous, the same on all of them."""
    if lane.size == 1:
        return row.view(1, -1)
    rows = row.new_empty(lane.size * row.numel())
    lane.all_gather(rows, row.contiguous()).wait()
    return rows.view(lane.size, row.numel())


def exchange_text(lane: Lane, text: str, width: int = 2048) -> Sequence[str]:
    """The texts of all ranks, each cut to ``width`` bytes."""
    data = text.encode()[:width].ljust(width, b"\0")
    rows = exchange(lane, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def exchange_bytes(lane: Lane, data: bytes) -> Sequence[bytes]:
    """The bytes that each rank brings, of any lengths. Two all-gathers, the second as long as the longest."""
    sizes = [int(n) for n in exchange(lane, torch.tensor([len(data)])).view(-1)]
    row = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    rows = exchange(lane, row)
    return [bytes(rows[rank, :size].tolist()) for rank, size in enumerate(sizes)]
