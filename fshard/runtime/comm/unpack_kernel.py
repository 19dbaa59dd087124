"""The sum of rows in a wire format, unpacked and added in one pass, as one kernel of Triton.

Imported where it is used: builds of PyTorch for the CPU have no Triton.
"""

from typing import Any

from torch import Tensor

from fshard.runtime.comm.triton_language import FUSION, constexpr, tl, triton
from fshard.sharding.wire import SCALE, WireFormat

SIZE = 1024
"""Elements that one program of the kernel adds up."""


def _unpack_sum(  # type: ignore[no-untyped-def]
    out,
    codes,
    scales,
    length,
    row,
    count: constexpr,
    add: constexpr,
    bits: constexpr,
    whole: constexpr,
    block: constexpr,
    size: constexpr,
):
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = at < length
    half: tl.constexpr = block // 2
    # With four bits the first half of a block is in the low bits of its bytes, the second in the high ones.
    code_at = codes + (at // block * half + at % half if bits == 4 else at)
    scale_at = scales + at // block
    total = tl.load(out + at, mask=there) if add else tl.full((size,), -0.0, tl.float32)  # which changes no number
    for _ in range(0, count):
        code = tl.load(code_at, mask=there, other=0).to(tl.int32)
        if bits == 4:
            value = (((code >> (at % block // half * 4).to(tl.int32)) & 15) - 8).to(tl.float32)
        elif whole:
            value = ((code ^ 128) - 128).to(tl.float32)
        else:  # e4m3: its exponent counts from 7, that of float32 from 127
            value = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
            value = tl.where((code & 127) == 127, float("nan"), value)
        total += value * tl.load(scale_at, mask=there, other=0.0)
        code_at += row
        scale_at += row // 4
    tl.store(out + at, total, mask=there)


KERNEL: Any = None if triton is None else triton.jit(_unpack_sum)


def fits(form: WireFormat) -> bool:
    """Tell whether the kernel unpacks a format."""
    return form.largest is not None and not form.rotate and form.name != "nf4"


def unpack_sum(rows: Tensor, form: WireFormat, out: Tensor, add: bool) -> None:
    """``out`` = the sum of packed rows in their order, plus its own value if ``add``. ``out`` is float32."""
    numel = out.numel()
    scales = rows.view(-1)[form.payload(numel) :]
    scales = scales[: len(scales) // SCALE * SCALE].view(out.dtype)
    codes = form.codes
    KERNEL[(triton.cdiv(numel, SIZE),)](
        *(out, rows, scales, numel, rows.shape[1], len(rows), add, codes.bits, codes.whole, form.block, SIZE), **FUSION
    )
