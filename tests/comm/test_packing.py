"""Packing: what arrives is what a formula says, whatever the length of a range, and what is not finite stays so."""

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fshard.runtime.comm import packing
from fshard.runtime.comm.packing import pack, packed, rotated, rounded, unpack, unpack_sum
from fshard.sharding.wire import SCALED, WireFormat

FORMS = [WireFormat("bf16"), *(WireFormat(name, block) for name in SCALED for block in (16, 256))]
OPTIONS = [
    WireFormat("int4", 64, rotate=True),
    WireFormat("int8", 256, stochastic=True),
    WireFormat("fp8_e4m3", 32, True),
]
IDS = {"ids": str}


def values(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes, with zeros."""
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=draw) * torch.exp(3 * torch.randn(count, generator=draw))
    x[::7] = 0
    x[: count // 8] = 0  # whole blocks
    return x.to(dtype)


def arrived(x: Tensor, form: WireFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    rounded(x, form, out)
    return out


def nearest(codes: Tensor, name: str) -> Tensor:
    """The values that codes of a format have, closest to these."""
    if name == "fp8_e4m3":
        return codes.to(torch.float8_e4m3fn).float()
    if name == "nf4":
        known = torch.tensor(packing.NF4)
        return known[(codes[:, None] - known).abs().argmin(1)]
    return codes.round()


def defined(x: Tensor, form: WireFormat) -> Tensor:
    """The definition, an element at a time."""
    if form.largest is None:
        return x.bfloat16().float()
    out = []
    for block in x.float().view(-1, form.block):
        scale = (block.abs().max() * torch.tensor(1 / form.largest)).clamp_min(2.0**-126)
        codes = block / scale
        out.append(nearest(codes, form.name) * scale)
    return torch.cat(out)


@pytest.mark.parametrize("form", FORMS, **IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_arrives_is_what_the_formula_says(form: WireFormat, dtype: torch.dtype) -> None:
    x = values(2048, dtype)
    assert torch.equal(arrived(x, form), defined(x, form))
    assert packed(x, form).nbytes == form.nbytes(2048)


@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
def test_a_part_has_the_bits_of_the_whole(form: WireFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length: ranges of ranks, and the pieces in which they are packed."""
    x = values(4096)
    whole = arrived(x, form)
    monkeypatch.setattr(packing, "PIECE", 1024)
    assert torch.equal(arrived(x, form), whole)
    for parts in (2, 4, 16):
        assert torch.equal(torch.cat([arrived(part.clone(), form) for part in x.chunk(parts)]), whole)


@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
def test_errors_are_half_a_code_at_most(form: WireFormat) -> None:
    x = values(4096)
    error = (arrived(x, form) - x).abs()
    if form.largest is None:
        assert (error <= x.abs() * 2.0**-8).all()
        return
    size = x.view(-1, form.block).abs().amax(1, keepdim=True)
    # Of fp8 the largest step is 32 of 448, of nf4 the first; a rotated block spreads its errors over its elements.
    steps = {"fp8_e4m3": 32 / 448, "nf4": packing.NF4[1] - packing.NF4[0]}
    share = (1 / form.largest if form.codes.whole else steps[form.name]) / 2 * (1 + form.stochastic)
    share *= math.sqrt(form.block) if form.rotate else 1
    assert (error.view(-1, form.block) <= size * (share + 1e-6)).all()


@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_become_a_number(form: WireFormat, wrong: float) -> None:
    x = values(1024)
    x[300] = wrong
    out = arrived(x, form)
    assert not out[300].isfinite()
    begin = 300 // form.block * form.block
    assert out[:begin].isfinite().all()
    assert out[begin + form.block :].isfinite().all()
    assert not torch.linalg.vector_norm(out).isfinite()


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-130, 2.0**-100, 2.0**120, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("form", FORMS[1:], **IDS)
def test_the_smallest_and_the_largest_numbers(form: WireFormat, size: float) -> None:
    x = torch.full((256,), size)
    out = arrived(x, form)
    assert out.isfinite().all()
    assert ((out - x).abs() <= max(size * 1e-6, 2.0**-126)).all()


@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_in_the_order_of_rows(form: WireFormat, dtype: torch.dtype) -> None:
    rows = [values(512) + number for number in range(3)]
    sent = torch.stack([packed(row, form) for row in rows])
    for add in (False, True):
        want = values(512, dtype) if add else torch.zeros(512, dtype=dtype)
        for number, row in enumerate(rows):
            want = want + arrived(row, form) if add or number else arrived(row, form).to(dtype)
        out = values(512, dtype)
        unpack_sum(sent, form, out, add)
        assert torch.equal(out, want)


def test_stochastic_rounding_is_right_on_average() -> None:
    form = WireFormat("int4", 64, stochastic=True)
    draw = torch.Generator().manual_seed(0)
    x = 0.3 + 0.001 * torch.randn(64 * 4000, generator=draw)
    x.view(-1, 64)[:, 0] = 1.0
    out = arrived(x, form).view(-1, 64)[:, 1:]
    nearest = arrived(x, WireFormat("int4", 64)).view(-1, 64)[:, 1:]
    assert abs(out.mean() - 0.3) < 1e-3
    assert abs(nearest.mean() - 0.3) > 1e-2
    assert {*out.mul(7).round().unique().tolist()} == {2.0, 3.0}
    assert torch.equal(arrived(x, form), arrived(x, form))


@pytest.mark.parametrize("width", [16, 256])
def test_a_rotation_is_its_own_inverse_and_keeps_lengths(width: int) -> None:
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(rotated(rotated(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated(x).norm(dim=1), x.norm(dim=1))


def test_a_rotation_spreads_an_outlier() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, generator=draw)
    x[5] = 100.0
    plain, turned = WireFormat("int4", 256), WireFormat("int4", 256, rotate=True)
    assert (arrived(x, turned) - x).norm() < 0.7 * (arrived(x, plain) - x).norm()


def test_a_range_is_written_in_place() -> None:
    form, x = WireFormat("int8", 16), values(64)
    room = torch.zeros(2, form.nbytes(64), dtype=torch.uint8)
    assert pack(x, form, room[1]).data_ptr() == room[1].data_ptr()
    assert not room[0].any()
    out = torch.ones(64)
    unpack(room[1], form, out, add=True)
    assert torch.equal(out, arrived(x, form) + 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_added_one_after_the_other(form: WireFormat, dtype: torch.dtype) -> None:
    """In bits, in pieces, in any number; also what is no number, and zeros of both signs."""
    count = 8 * form.block
    rows = torch.stack([packed(values(count) * (number + 1), form) for number in range(packing.MOST + 1)])
    odd = values(count)
    odd[0], odd[form.block], odd[-1], odd[2] = math.inf, math.nan, -math.inf, -0.0
    rows[1] = packed(odd, form)
    for many in range(1, len(rows) + 1):
        for add in (False, True):
            want, got = (torch.full((count,), -0.0, dtype=dtype) for _ in range(2))
            for number, row in enumerate(rows[:many]):
                unpack(row, form, want, add or number > 0)
            with patch.object(packing, "PIECE", 2 * form.block):
                unpack_sum(rows[:many], form, got, add)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
