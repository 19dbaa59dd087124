"""One kernel of Triton unpacks and sums rows of a wire format, with the bits of PyTorch's operators or not at all."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fshard.runtime.comm import packing, unpack_kernel
from fshard.runtime.comm.packing import packed, right_sums, sum_kernel_of, unpack_sum
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.comm.triton_language import FUSION, triton
from fshard.sharding.wire import WireFormat

CPU = torch.device("cpu")
FORMS = [WireFormat(name, block) for name in ("int8", "int4", "fp8_e4m3") for block in (16, 256)]
TRITON = pytest.mark.skipif(unpack_kernel.KERNEL is None, reason="this build of PyTorch comes without Triton")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are unpacked as on a device."""
    monkeypatch.setattr(packing, "on_host", lambda device: False)


def two_passes(rows: Tensor, form: WireFormat, out: Tensor, add: bool) -> None:
    """The definition: rows in float32, then their sum."""
    sum_rows(out, packing._values(rows, form, None, out.numel()), add)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_kernel_with_other_bits_or_that_cannot_be_compiled_is_not_used(form: WireFormat) -> None:
    def other_order(rows: Tensor, form: WireFormat, out: Tensor, add: bool) -> None:
        two_passes(rows.flip(0).contiguous(), form, out, add)

    def no_compiler(rows: Tensor, form: WireFormat, out: Tensor, add: bool) -> None:
        raise RuntimeError("Failed to find C compiler")

    assert right_sums(two_passes, form, CPU) is two_passes
    with pytest.warns(UserWarning, match=f"sums rows in {form} cannot be used on cpu: it has other bits"):
        assert right_sums(other_order, form, CPU) is None
    with pytest.warns(UserWarning, match="C compiler"):
        assert right_sums(no_compiler, form, CPU) is None
    assert sum_kernel_of(CPU, form) is None


def test_a_kernel_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def kernel(rows: Tensor, form: WireFormat, out: Tensor, add: bool) -> None:
        taken.append(str(form))
        two_passes(rows, form, out, add)

    fits = unpack_kernel.fits
    monkeypatch.setattr(packing, "sum_kernel_of", lambda device, form: kernel if fits(form) else None)
    others = [WireFormat("bf16"), WireFormat("int8", 16, rotate=True), WireFormat("nf4", 16)]
    for form in [*FORMS, *others]:
        rows = torch.stack([packed(torch.randn(512) * number, form) for number in range(1, 4)])
        for out in (torch.ones(512), torch.ones(512, dtype=torch.float64), torch.ones(1024)[::2]):
            want = out.clone()
            two_passes(rows, form, want, True)
            unpack_sum(rows, form, out, True)
            assert torch.equal(out, want)
    assert taken == [str(form) for form in FORMS]


INTERPRETED = """
import torch
from fshard.runtime.comm import packing, unpack_kernel
from tests.comm.test_unpack_kernel import CPU, FORMS
packing.on_host = lambda device: False
for form in FORMS:
    assert packing.right_sums(unpack_kernel.unpack_sum, form, CPU) is unpack_kernel.unpack_sum, form
"""


@TRITON
def test_the_kernel_has_these_bits_where_triton_interprets_it() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=120)


@TRITON
@pytest.mark.parametrize("form", FORMS[1::2], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_the_kernel_multiplies_and_adds_apart_when_it_is_compiled_for_a_gpu(form: WireFormat, add: bool) -> None:
    """This needs no GPU: Triton comes with NVIDIA's assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named: dict[str, Any] = {"count": 8, "add": add, "bits": form.codes.bits, "whole": form.codes.whole}
    named |= {"block": form.block, "size": unpack_kernel.SIZE}
    types = {"out": "*fp32", "codes": "*u8", "scales": "*fp32", "length": "i32", "row": "i32"}
    source = ASTSource(fn=unpack_kernel.KERNEL, signature=types | dict.fromkeys(named, "constexpr"), constexprs=named)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=FUSION)
    assert "add.rn.f32" in made.asm["ptx"] and "fma" not in made.asm["ptx"] and made.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_gpu_sums_with_the_kernel(form: WireFormat) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert sum_kernel_of(device, form) is unpack_kernel.unpack_sum
