"""Rows of other ranks are summed in the order of ranks; one kernel on a GPU has the bits of sums one by one."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.runtime.comm import row_kernel, row_sums
from fshard.runtime.comm.row_sums import right, sum_rows
from fshard.runtime.comm.triton_language import FUSION, tl, triton

CPU = torch.device("cpu")


def numbers(rows: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows whose sum depends on the order."""
    draw = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, length, generator=draw) * torch.randn(rows, 1, generator=draw).exp()).to(dtype)


def one_by_one(out: Tensor, rows: Tensor, add: bool) -> Tensor:
    """The definition."""
    total = out.clone() if add else torch.zeros_like(out)
    for number, row in enumerate(rows):
        total = row.to(out.dtype) if number == 0 and not add else total + row
    return total


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_added_in_their_order(dtype: torch.dtype, count: int, add: bool) -> None:
    rows, out = (
        numbers(count, 33, dtype),
        torch.full((33,), 0.1, dtype=max(dtype, torch.float32, key=lambda d: d.itemsize)),
    )
    want = one_by_one(out, rows, add)
    sum_rows(out, rows, add)
    assert torch.equal(out, want)


def test_a_kernel_takes_rows_of_a_tensor_that_it_has_the_dtypes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def kernel(out: Tensor, rows: Tensor, add: bool) -> None:
        taken.append(len(rows))

    monkeypatch.setattr(row_sums, "kernel_of", lambda device: kernel)
    sum_rows(torch.zeros(4), numbers(3, 4), True)
    sum_rows(torch.zeros(4), numbers(8, 4, torch.bfloat16), False)
    assert taken == [3, 8]
    others: list[tuple[Tensor, Any]] = [
        (torch.zeros(4), numbers(2, 4)),  # no fewer kernels
        (torch.zeros(4), [*numbers(3, 4)]),  # rows that arrive one after the other
        (torch.zeros(4, dtype=torch.float64), numbers(3, 4)),
        (torch.zeros(4, dtype=torch.bfloat16), numbers(3, 4, torch.bfloat16)),  # a sum is rounded after each row
        (torch.zeros(8)[::2], numbers(3, 4)),
        (torch.zeros(4), numbers(4, 3).T),
    ]
    for out, rows in others:
        want = one_by_one(out, rows, False)
        sum_rows(out, rows, False)
        assert torch.equal(out, want)
    assert taken == [3, 8]


def test_a_kernel_with_other_bits_or_that_cannot_be_compiled_is_not_used() -> None:
    def other_order(out: Tensor, rows: Tensor, add: bool) -> None:
        sum_rows(out, rows.flip(0).contiguous(), add)

    def no_compiler(out: Tensor, rows: Tensor, add: bool) -> None:
        raise RuntimeError("Failed to find C compiler")

    with pytest.warns(UserWarning, match="other bits"):
        assert right(other_order, CPU) is None
    with pytest.warns(UserWarning, match="C compiler"):
        assert right(no_compiler, CPU) is None
    assert right(sum_rows, CPU) is sum_rows
    assert row_sums.kernel_of(CPU) is None


class Draws(TorchDispatchMode):
    """Notes the operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] * (torch.Tag.nondeterministic_seeded in func.tags)
        return func(*args, **(kwargs or {}))


def test_the_check_of_a_kernel_draws_nothing() -> None:
    """It may run in a unit that is computed again, where draws from a generator are refused."""
    with Draws() as draws:
        assert right(sum_rows, CPU) is sum_rows
        assert not draws.seen
        numbers(2, 4)
        assert draws.seen


INTERPRETED = """
import torch
from fshard.runtime.comm import row_kernel
from fshard.runtime.comm.row_sums import right
from tests.comm.test_row_sums import CPU, numbers, one_by_one
assert right(row_kernel.sum_rows, CPU) is row_kernel.sum_rows
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for count in (3, 8, 64):
        for length in (1, 1000, 5000):
            for add in (False, True):
                rows, out = numbers(count, length, dtype), torch.full((length,), 0.1)
                want = one_by_one(out, rows, add)
                row_kernel.sum_rows(out, rows, add)
                assert torch.equal(out, want), (dtype, count, length, add)
"""


@pytest.mark.skipif(row_kernel.KERNEL is None, reason="this build of PyTorch comes without Triton")
def test_the_kernel_has_these_bits_where_triton_interprets_it() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=120)


@pytest.mark.skipif(row_kernel.KERNEL is None, reason="this build of PyTorch comes without Triton")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", ["*fp32", "*bf16", "*fp16"])
def test_the_kernel_is_plain_sums_when_it_is_compiled_for_a_gpu(rows: str, add: bool) -> None:
    """This needs no GPU: Triton comes with NVIDIA's assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = {"count": 8, "add": add, "wide": tl.float32, "block": row_kernel.BLOCK}
    signature = {"out": "*fp32", "rows": rows, "length": "i32"} | dict.fromkeys(named, "constexpr")
    source = ASTSource(fn=row_kernel.KERNEL, signature=signature, constexprs=named)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=FUSION)
    assert "add.rn.f32" in made.asm["ptx"] and "fma" not in made.asm["ptx"] and made.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("count", [3, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_sums_one_by_one(dtype: torch.dtype, count: int, add: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert row_sums.kernel_of(device) is row_kernel.sum_rows
    for length in (1, 1000, 1 << 20):
        rows, out = numbers(count, length, dtype).to(device), torch.full((length,), 0.1, device=device)
        want = one_by_one(out, rows, add)
        row_kernel.sum_rows(out, rows, add)
        assert torch.equal(out, want)
