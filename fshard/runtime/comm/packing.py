"""Packing: from tensors to the bytes of a wire format, and back.

A packed range is a 1-D uint8 tensor: the payload, and behind it the float32 scales of its blocks, so that one message
has both. Every element depends on its own block alone, by operations whose results do not depend on the length of the
tensor. So a leaf that is packed in parts has the bits of the leaf that is packed as a whole.

The host packs ranges one after the other, and each in pieces that stay in the cache. On a device all rows of a transfer
are one tensor: how many kernels are launched does not depend on the number of ranks.

A block with an element that is not finite has a scale that is not finite, and no element of it is finite again after
unpacking: infinities and nan in a gradient reach its norm.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.runtime.comm.row_sums import SHORT, checked, sum_rows
from fshard.sharding.wire import WireFormat

PIECE = 1 << 17
"""Elements that are packed at once on the host: what several passes read stays in the cache."""

SMALLEST = 2.0**-126
"""Of scales. A smaller one could not be divided by."""

SOME = 1 << 15
"""Elements that the host rounds to NormalFloat at once: what tables say of them stays in the cache."""

NIBBLE = 8
"""What is added to a code of four bits."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of NormalFloat codes: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Dettmers et al., 2023,
appendix E)."""

CELLS = 256
"""Equal parts of [-1, 1]. Each holds at most one middle between two NormalFloat values."""

MOST = 8
"""Packed ranges that one kernel sums."""

Kernel = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], object]
"""Packs, or unpacks, the blocks of a piece: its rows, and the payloads and the scales of packed ranges."""

Kernels = Callable[[str, WireFormat, int], Kernel | None]
"""Compiled kernels with the bits of PyTorch's ops; None to use these. ``"pack"`` is for one range, ``"unpack"`` writes
the sum of so many in their order, and ``"add"`` adds them one after the other."""

SumKernel = Callable[[Tensor, WireFormat, Tensor, bool], None]
"""``kernel(rows, form, out, add)`` does as ``unpack_sum`` on a device."""


def no_kernels(what: str, form: WireFormat, ranges: int) -> None:
    """PyTorch's ops alone."""


def packed(source: Tensor, form: WireFormat, kernels: Kernels = no_kernels) -> Tensor:
    """A 1-D tensor in a wire format. Its length is a multiple of the block.

    >>> packed(torch.arange(16.0), WireFormat("int8", 16))[:16].tolist()
    [0, 8, 17, 25, 34, 42, 51, 59, 68, 76, 85, 93, 102, 110, 119, 127]
    """
    out = torch.empty(form.nbytes(source.numel()), dtype=torch.uint8, device=source.device)
    return pack(source, form, out, kernels)


def pack(source: Tensor, form: WireFormat, out: Tensor, kernels: Kernels = no_kernels) -> Tensor:
    """Write a 1-D tensor to ``out`` in a wire format, and return it."""
    pack_rows(source.unsqueeze(0), form, out.unsqueeze(0), kernels)
    return out


def pack_rows(source: Tensor, form: WireFormat, out: Tensor, kernels: Kernels = no_kernels) -> None:
    """Write each row of a 2-D tensor to a row of ``out`` in a wire format."""
    if on_host(source.device):
        for row, packed_row in zip(source.unbind(), out.unbind(), strict=True):
            _pack_host(row, form, packed_row, kernels)
    elif form.largest is None:
        out.view(torch.bfloat16).copy_(source)
    elif source.numel():
        rows = source.view(len(source), -1, form.block)
        _pack_blocks(rows, form, *_parts(out, form, source.shape[1]), rows.new_empty(rows.shape, dtype=torch.float32))


def _pack_host(source: Tensor, form: WireFormat, out: Tensor, kernels: Kernels) -> None:
    payload, scales = _parts(out, form, source.numel())
    room, kernel = _room(source), _kernel(kernels, "pack", form, source)
    for cut, codes, blocks in _pieces(source.numel(), form):
        if form.largest is None:
            payload[codes].view(torch.bfloat16).copy_(source[cut])
        elif kernel is not None and cut.stop - cut.start == PIECE:
            kernel(source[cut].view(-1, form.block), [payload[codes]], [scales[blocks]])
        else:
            rows = source[cut].view(-1, form.block)
            _pack_blocks(rows, form, payload[codes], scales[blocks], room[: rows.numel()].view(rows.shape))


def unpack(given: Tensor, form: WireFormat, out: Tensor, add: int = 0, kernels: Kernels = no_kernels) -> None:
    """Write the tensor that a packed range holds to ``out``, or, where ``add`` is not 0, add it that many times."""
    unpack_rows(given.unsqueeze(0), form, out.unsqueeze(0), add, kernels)


def unpack_rows(rows: Tensor, form: WireFormat, out: Tensor, add: int = 0, kernels: Kernels = no_kernels) -> None:
    """Write what each packed row holds to a row of ``out``, or, where ``add`` is not 0, add it that many times.

    Codes are exact in short dtypes, and only their product with the scale is rounded. So a device needs no more memory.
    """
    add = int(add)
    if on_host(out.device):
        for row, part in zip(rows.unbind(), out.unbind(), strict=True):
            _unpack_host([row], form, part, add, kernels)
        return
    direct = _direct(out, add) or (not add and out.dtype in SHORT and not form.rotate and form.name != "nf4")
    values = _values(rows, form, out if direct else None, out.shape[1])
    if add:
        out.add_(values, alpha=add)
    elif values is not out:
        out.copy_(values)


def unpack_sum(rows: Tensor, form: WireFormat, out: Tensor, add: bool, kernels: Kernels = no_kernels) -> None:
    """``out`` = the sum of the rows in their order, plus its own value if ``add``."""
    if not on_host(out.device):
        kernel = sum_kernel_of(out.device, form) if out.dtype == torch.float32 and out.is_contiguous() else None
        if kernel is not None and out.numel() and rows.is_contiguous():
            kernel(rows, form, out, add)
        else:
            sum_rows(out, _values(rows, form, None, out.numel()), add)
        return
    for number, some in enumerate(torch.split(rows, MOST)):
        _unpack_host(some.unbind(), form, out, int(add or number > 0), kernels)


@functools.cache
def sum_kernel_of(device: torch.device, form: WireFormat) -> SumKernel | None:
    """The kernel that unpacks and adds rows on a device; None where there is none. Its first call waits for it."""
    if device.type != "cuda":
        return None
    from fshard.runtime.comm import unpack_kernel

    fits = unpack_kernel.KERNEL is not None and unpack_kernel.fits(form)
    return right_sums(unpack_kernel.unpack_sum, form, device) if fits else None


def right_sums(kernel: SumKernel, form: WireFormat, device: torch.device) -> SumKernel | None:
    """A kernel, if it can be compiled here and has the bits of PyTorch's operators; else None, with a warning."""

    def same() -> bool:
        count = form.block * 40
        rows = torch.arange(5 * form.nbytes(count), device=device).mul_(40503).bitwise_right_shift_(5).to(torch.uint8)
        rows = rows.view(5, -1)  # every code; and scales of many sizes
        scales = torch.arange(5 * 40, device=device).view(5, 40).float().mul(12.9898).sin().pow(9)
        _parts(rows, form, count)[1].copy_(scales)
        for add in (False, True):
            ours, theirs = [torch.full((count,), 0.1, dtype=torch.float32, device=device) for _ in range(2)]
            kernel(rows, form, ours, add)
            sum_rows(theirs, _values(rows, form, None, count), add)
            if not torch.equal(ours.nan_to_num_(1e9), theirs.nan_to_num_(1e9)):
                return False
        return True

    does, instead = f"that unpacks and sums rows in {form}", "two kernels and memory for unpacked rows make them"
    return checked(kernel, does, device, same, instead)


def _values(rows: Tensor, form: WireFormat, out: Tensor | None, numel: int) -> Tensor:
    """The numbers that packed rows hold, by row: in ``out``, or in memory of its own; float32 if they have scales."""
    if form.largest is None:
        values = rows.view(torch.bfloat16)
        return values if out is None else out.copy_(values)
    if out is None:
        out = rows.new_empty((len(rows), numel), dtype=torch.float32)
    if numel:
        _unpack_blocks(*_parts(rows, form, numel), form, out.view(len(rows), -1, form.block))
    return out


def _unpack_host(ranges: Sequence[Tensor], form: WireFormat, out: Tensor, add: int, kernels: Kernels) -> None:
    """Write the sum of packed ranges in their order to ``out``, or add them that many times, one after the other.

    A piece of ``out`` takes all ranges before the next one, so that it is read and written once.
    """
    parts = [_parts(given, form, out.numel()) for given in ranges]
    kernel = _kernel(kernels, "add" if add else "unpack", form, out, len(ranges)) if add in (0, 1) else None
    room = out if _direct(out, add) and len(ranges) == 1 else _room(out)
    for cut, codes, blocks in _pieces(out.numel(), form):
        whole = out[cut]
        if kernel is not None and whole.numel() == PIECE:
            kernel(whole.view(-1, form.block), [p[codes] for p, _ in parts], [s[blocks] for _, s in parts])
            continue
        for number, (payload, scales) in enumerate(parts):
            _unpack_piece((payload[codes], scales[blocks]), form, whole, add or int(number > 0), room)


def _direct(out: Tensor, add: int) -> bool:
    """Tell whether what is unpacked needs no memory of its own."""
    return out.dtype == torch.float32 and not add


def _unpack_piece(part: tuple[Tensor, Tensor], form: WireFormat, out: Tensor, add: int, room: Tensor) -> None:
    """Write a payload and its scales to ``out``, or add them that many times. ``room`` has as many elements or more."""
    piece = out if _direct(out, add) else room[: out.numel()]
    payload, scales = part
    if form.largest is None:
        piece.copy_(payload.view(torch.bfloat16))
    else:
        _unpack_blocks(payload, scales, form, piece.view(-1, form.block))
    if add:
        out.add_(piece, alpha=add)
    elif piece is not out:
        out.copy_(piece)


def rounded(source: Tensor, form: WireFormat, out: Tensor, kernels: Kernels = no_kernels) -> None:
    """Write to ``out`` the values that would arrive of a 1-D tensor."""
    unpack(packed(source, form, kernels), form, out, False, kernels)


def _kernel(kernels: Kernels, what: str, form: WireFormat, x: Tensor, ranges: int = 1) -> Kernel | None:
    """The kernel for pieces of a tensor; None where it is too short, or not of float32."""
    fits = form.largest is not None and x.numel() >= PIECE and x.dtype == torch.float32
    return kernels(what, form, ranges) if fits else None


def _parts(given: Tensor, form: WireFormat, numel: int) -> tuple[Tensor, Tensor]:
    """The payloads and the scales of packed ranges, which are the last dim."""
    end = form.payload(numel)
    return given[..., :end], given[..., end:].view(torch.float32)


def on_host(device: torch.device) -> bool:
    """Tell whether the host packs, or would, so that the cache matters and the number of calls does not."""
    return device.type in ("cpu", "meta")


def _pieces(numel: int, form: WireFormat) -> Iterator[tuple[slice, slice, slice]]:
    """The ranges of pieces: of elements, of bytes of the payload, and of scales."""
    for begin in range(0, numel, PIECE):
        end = min(begin + PIECE, numel)
        codes = slice(form.payload(begin), form.payload(end))
        yield slice(begin, end), codes, slice(begin // form.block, end // form.block)


def _room(x: Tensor) -> Tensor:
    """Memory for the results of a piece, in float32: new memory for each piece would take as long as its work."""
    return x.new_empty(min(PIECE, x.numel()), dtype=torch.float32)


def _pack_blocks(rows: Tensor, form: WireFormat, payload: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Pack blocks, which are the last dim of ``rows``. ``codes`` is room for as many numbers."""
    assert form.largest is not None
    apart = not on_host(rows.device)
    if not apart or form.rotate or form.stochastic or rows.dtype == torch.float64:
        rows = rows.float()
    if form.rotate:
        rows = rotated(rows)
    if apart:
        torch.linalg.vector_norm(rows, math.inf, -1, dtype=torch.float32, out=scales)
    else:  # a norm takes ten times as long there; two reductions read the rows once more, and write nothing
        torch.amax(rows, -1, out=scales)
        torch.maximum(scales, torch.amin(rows, -1).neg_(), out=scales)
    scales.mul_(1 / form.largest).clamp_min_(SMALLEST)
    torch.div(rows, scales.unsqueeze(-1), out=codes)
    if form.stochastic and form.codes.whole:
        codes.add_(noise(rows)).floor_().clamp_(-form.largest, form.largest)
    if form.name == "nf4":
        _round_to_nf4(codes)
    if form.codes.bits == 8:
        if form.codes.whole:
            codes.round_()
        payload.view(form.codes.dtype).view(codes.shape).copy_(codes)
        return
    # The first half of a block is in the low bits, the second in the high ones.
    pairs = payload.view(*codes.shape[:-1], form.block // 2)
    if apart:
        numbers = torch.bucketize(codes, _steps(codes.device), out_int32=True, right=True)
        low, high = numbers.view(*pairs.shape[:-1], 2, -1).unbind(-2)
        torch.add(low, high, alpha=2 * NIBBLE, out=pairs)
    else:
        low, high = codes.round_().view(*pairs.shape[:-1], 2, -1).unbind(-2)
        low.add_(high, alpha=2 * NIBBLE).add_(NIBBLE + 2 * NIBBLE * NIBBLE)
        pairs.copy_(low)


@functools.cache
def _steps(device: torch.device) -> Tensor:
    """The least numbers of the codes 1 to 15 of four bits: half of the way between two goes to the even one."""
    halves = torch.arange(-NIBBLE, NIBBLE - 1, dtype=torch.float32, device=device) + 0.5
    even = halves.floor().remainder(2) == 0
    return torch.where(even, halves.nextafter(torch.full_like(halves, math.inf)), halves)


def _round_to_nf4(codes: Tensor) -> None:
    """Write the number of the nearest value, less ``NIBBLE``: how many of the middles between values are less.

    A cell says how many middles lie in those below it, and which one lies in it. It need not be the right one for
    elements near its ends: what it is grows with the element, and does so for middles and elements alike.
    """
    tables, flat = _nf4_tables(codes.device), codes.view(-1)
    some = SOME if on_host(codes.device) else flat.numel()
    for begin in range(0, flat.numel(), some):
        part = flat[begin : begin + some]
        cells = _cells(part)
        above = torch.gt(part, tables.middles.index_select(0, cells))
        part.copy_(tables.below.index_select(0, cells).add_(above.view(torch.int8)))


def _cells(values: Tensor) -> Tensor:
    """The numbers of the cells of values in [-1, 1]; of any cell for nan."""
    return values.mul(CELLS / 2 - 0.5).add_(CELLS / 2 - 0.5).int().bitwise_and_(CELLS - 1)


class _Nf4(NamedTuple):
    """Tables of nf4: for a cell the middles below it, less ``NIBBLE``, and the middle in it; for a byte its values."""

    below: Tensor
    middles: Tensor
    values: tuple[Tensor, Tensor]


@functools.cache
def _nf4_tables(device: torch.device) -> _Nf4:
    values = torch.tensor(NF4, device=device)
    between = torch.tensor([(below + above) / 2 for below, above in itertools.pairwise(NF4)], device=device)
    cells = _cells(between)
    below = (torch.arange(CELLS, device=device).unsqueeze(1) > cells).sum(1).sub_(NIBBLE)
    middles = torch.full((CELLS,), math.inf, device=device).index_copy_(0, cells.long(), between)
    byte = torch.arange(256, device=device)
    return _Nf4(below.to(torch.int8), middles, (values[byte & (2 * NIBBLE - 1)], values[byte >> 4]))


def _unpack_blocks(payload: Tensor, scales: Tensor, form: WireFormat, rows: Tensor) -> None:
    """Write the blocks of a payload and their scales to ``rows``, whose last dim they are."""
    factors = scales.unsqueeze(-1)
    if form.codes.bits == 4:
        pairs = payload.view(*rows.shape[:-1], form.block // 2)
        low, high = rows.view(*rows.shape[:-1], 2, -1).unbind(-2)
        if form.name == "nf4":
            numbers = pairs.reshape(-1).int()
            for half, values in zip((low, high), _nf4_tables(rows.device).values, strict=True):
                half.copy_(values.index_select(0, numbers).view(half.shape))
        else:
            torch.bitwise_and(pairs, 2 * NIBBLE - 1, out=low)
            torch.bitwise_right_shift(pairs, 4, out=high)
            rows.sub_(NIBBLE)
        rows.mul_(factors)
    elif form.codes.whole:
        torch.mul(payload.view(form.codes.dtype).view(rows.shape), factors, out=rows)
    else:
        rows.copy_(payload.view(form.codes.dtype).view(rows.shape)).mul_(factors)
    if form.rotate:
        rows.copy_(rotated(rows))


def rotated(rows: Tensor) -> Tensor:
    """Rows of a power of two of elements, times the orthonormal Hadamard matrix, which is its own inverse.

    Sums of pairs, and not a product of matrices, whose last bits depend on the number of rows.

    >>> rotated(torch.tensor([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[0.5, 0.5, 0.5, 0.5]]
    """
    shape, step = rows.shape, 1
    while step < shape[-1]:
        pairs = rows.view(-1, shape[-1] // (2 * step), 2, step)
        rows = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        step *= 2
    return rows.view(shape) * (1 / math.sqrt(shape[-1]))


def noise(rows: Tensor) -> Tensor:
    """Numbers in [0, 1) for float32 rows: a hash of each element and its place in the row."""
    bits = rows.contiguous().view(torch.int32) + torch.arange(rows.shape[-1], dtype=torch.int32, device=rows.device)
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 0x297A2D39)):
        bits = (bits ^ (bits >> shift)) * factor
    low: Tensor = bits & 0xFFFFFF
    return low.float().mul_(2.0**-24)
