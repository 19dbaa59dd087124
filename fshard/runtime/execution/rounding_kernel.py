"""Stochastic rounding as one kernel of Triton, which comes with PyTorch's builds for CUDA.

Imported where it is used: other builds have no Triton.
"""

from typing import Any

from torch import Tensor

from fshard.runtime.comm.triton_language import constexpr, tl, triton
from fshard.runtime.execution.rounding_bits import MIX, WEYL, Key, Positions, signed

BLOCK = 1024
"""Elements that one program of the kernel rounds."""


def _round_to(  # type: ignore[no-untyped-def]
    out,
    x,
    begin,
    length,
    table,
    leaves,
    key,
    searches: constexpr,
    levels: constexpr,
    weyl: constexpr,
    mix: constexpr,
    grain: constexpr,
    counters: constexpr,
    stored: constexpr,
):
    if stored:
        key = tl.load(key)
    first = (tl.program_id(0).to(tl.int64) * counters + tl.arange(0, counters)) * grain
    leaf = tl.zeros((counters,), tl.int64)
    for number in tl.static_range(searches):
        probe = leaf + (1 << (searches - 1 - number))
        leaf = tl.where(tl.load(table + probe, mask=probe < leaves, other=1 << 62) <= begin + first, probe, leaf)
    index = begin + first + tl.load(table + 2 * leaves + leaf)
    for level in tl.static_range(levels):
        row = table + (3 + 3 * level) * leaves + leaf
        narrow = tl.load(row)
        index = index // narrow * tl.load(row + leaves) + index % narrow + tl.load(row + 2 * leaves)
    state = tl.load(table + leaves + leaf) + key + (index >> 2) * weyl
    for number in tl.static_range(3):
        state = (state ^ ((state >> mix[3 * number]) & mix[3 * number + 1])) * mix[3 * number + 2]
    word = (index & 3)[:, None] + tl.arange(0, grain)[None, :]
    bits = ((state[:, None] >> (word * 16)) & 65535) ^ 32768
    at = first[:, None] + tl.arange(0, grain)[None, :]
    value = tl.load(x + at, mask=at < length, other=0.0)
    rounded = ((value.to(tl.int32, bitcast=True) + bits.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    tl.store(out + at, tl.where(value == value, rounded, value).to(tl.bfloat16), mask=at < length)


KERNEL: Any = None if triton is None else triton.jit(_round_to, do_not_specialize=["begin", "length", "key"])

CONSTANTS = {"weyl": WEYL, "mix": tuple(n for shift, factor in MIX for n in (shift, (1 << 64 - shift) - 1, factor))}


def round_to(out: Tensor, x: Tensor, begin: int, positions: Positions, key: Key) -> None:
    """``out``, bfloat16, = ``x``, float32, rounded as by ``round_``; ``begin`` is the first element in the buffer."""
    leaves, counters, stored = positions.table.shape[1], BLOCK // positions.grain, isinstance(key, Tensor)
    KERNEL[(triton.cdiv(len(x), BLOCK),)](
        *(out, x, begin, len(x), positions.table, leaves, key if isinstance(key, Tensor) else signed(key)),
        searches=(leaves - 1).bit_length(),
        levels=positions.levels,
        grain=positions.grain,
        counters=counters,
        stored=stored,
        **CONSTANTS,
    )
