"""Tensors of which several ranks hold copies, compared by a hash of their bits, and by element if hashes differ."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.runtime.comm.communicator import Communicator
from fshard.runtime.comm.exchange import exchange, exchange_bytes

BLOCK = 1 << 16
"""Elements that are hashed or compared at once."""

GOLDEN = -7046029254386353131
"""2**64 divided by the golden ratio: its multiples are spread evenly."""

MOST = 16
"""Most unequal tensors whose elements are compared."""

RELATIVE = 1e-3
"""Inexact copies may differ by this part of their largest element."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A part of a tensor of which other ranks hold copies.

    Attributes:
        name: the same on all ranks.
        holders: the ranks that hold this part.
        tensor: the part, 1-D and contiguous.
        exact: whether bits must be equal, or values up to rounding.
        first: the number of its first element in the whole tensor, for errors.
    """

    name: str
    holders: tuple[int, ...]
    tensor: Tensor
    exact: bool = True
    first: int = 0

    @property
    def loose(self) -> bool:
        """Tell whether values may differ by rounding."""
        return self.tensor.dtype.is_floating_point and not self.exact


def bits(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's bits, computed on its device. Any change of one element changes it.

    >>> bits(torch.tensor([1.0, 2.0])) == bits(torch.tensor([1.0, 2.0])), bits(torch.zeros(2)) == bits(torch.zeros(3))
    (True, False)
    """
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    rest = -len(flat) % 8
    head = flat[: len(flat) - len(flat) % 8]
    if head.storage_offset() % 8 or head.data_ptr() % 8:
        head = head.clone()
    weights = torch.arange(1, min(BLOCK, len(head) // 8 + 1) + 1, device=flat.device) * GOLDEN | 1
    sums = [(block * weights[: len(block)]).sum() for block in _blocks(head.view(torch.int64))]
    if rest:
        tail = torch.cat([flat[len(head) :], flat.new_zeros(rest)])
        sums.append(tail.view(torch.int64)[0] * weights[0])
    out = len(flat)
    for part in torch.stack(sums).tolist() if sums else ():
        out = (out * 0x100000001B3 + part) % (1 << 64)
    return out


def _blocks(flat: Tensor) -> list[Tensor]:
    return [flat[at : at + BLOCK] for at in range(0, len(flat), BLOCK)]


def unequal_copies(comm: Communicator, copies: Sequence[Copy]) -> list[tuple[str, dict[int, str]]]:
    """The names of differing copies, and their values by rank; the same on all ranks. Collective.

    Args:
        comm: the control communicator over the whole mesh.
        copies: those of this rank. Other ranks may have others, or none.
    """
    hashes = [bits(copy.tensor) for copy in copies]
    whole: dict[str, int] = {}
    for copy, number in zip(copies, hashes, strict=True):
        key = " ".join(map(str, copy.holders))
        whole[key] = (whole.get(key, 0) * 0x100000001B3 + number) % (1 << 64)
    rows = [json.loads(row) for row in exchange_bytes(comm, json.dumps(whole).encode())]
    return _named(comm, copies, hashes) if _apart(rows) else []


def _named(comm: Communicator, copies: Sequence[Copy], hashes: Sequence[int]) -> list[tuple[str, dict[int, str]]]:
    """The copies that differ, if the combined hashes do. Collective."""
    own = {copy.name: copy for copy in copies}
    pairs = zip(copies, hashes, strict=True)
    said = {copy.name: [number, copy.holders, len(copy.tensor), copy.first, copy.loose] for copy, number in pairs}
    told = exchange_bytes(comm, zlib.compress(json.dumps(said).encode()))
    tables = [json.loads(zlib.decompress(row)) for row in told]
    out: list[tuple[str, dict[int, str]]] = []
    for name in dict.fromkeys(name for table in tables for name in table):
        parts = [table[name] for table in tables if name in table]
        if _apart([{" ".join(map(str, holders)): number} for number, holders, *_ in parts]):
            firsts = {tuple(holders): first for _, holders, _, first, _ in parts}
            size, loose = max(part[2] for part in parts), any(part[4] for part in parts)
            out += _look(comm, name, own.get(name), firsts, size, loose)
            if len(out) >= MOST:
                break
    return out


def _apart(rows: Sequence[Mapping[str, int]]) -> bool:
    """Tell whether ranks have different hashes of the same part."""
    found: dict[str, int] = {}
    return any(found.setdefault(key, number) != number for row in rows for key, number in row.items())


def _look(
    comm: Communicator, name: str, copy: Copy | None, firsts: Mapping[tuple[int, ...], int], size: int, loose: bool
) -> list[tuple[str, dict[int, str]]]:
    """The first element in which copies of a part differ. Collective, also for ranks without the part."""
    held = copy.tensor.detach() if copy is not None else torch.empty(0, device="cpu")
    real = held.abs() if held.is_complex() else held
    for begin in range(0, size, BLOCK):
        mine = torch.zeros(min(BLOCK, size - begin), dtype=torch.float64, device="cpu")
        part = real[begin : begin + BLOCK]
        mine[: len(part)] = part.to("cpu", torch.float64)
        rows = exchange(comm, mine)
        for ranks, first in firsts.items():
            some = rows[list(ranks)]
            near = (some == some[0]) | (some.isnan() & some[0].isnan())
            if loose:
                near |= (some - some[0]).abs() <= RELATIVE * some.abs().max()
            if not near.all():
                at = int((~near).any(0).nonzero()[0])
                return [(f"{name}, element {first + begin + at}", {r: f"{float(rows[r, at]):.9g}" for r in ranks})]
    return [] if loose else [(name, dict.fromkeys(next(iter(firsts)), "equal values of different bits"))]
