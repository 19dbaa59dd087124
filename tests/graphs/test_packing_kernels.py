"""Compiled kernels that pack: the bits of PyTorch's ops, in any length, and in steps."""

import math
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.runtime.comm.packing import MOST, PIECE, pack, packed, unpack, unpack_sum
from fshard.runtime.steps.backends import make_cache, packing_kernels
from fshard.sharding.wire import WireFormat

pytestmark = pytest.mark.slow
FORMS = [WireFormat("int8", 256), WireFormat("int4", 256)]


def _kernels() -> Any:
    """Kernels of nothing yet; Inductor's modules are imported here, since most who collect tests need none of them."""
    return packing_kernels(make_cache("inductor"))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_they_have_the_bits_of_torch(form: WireFormat) -> None:
    """Of small, large and zero blocks, and of what is left after the last whole piece."""
    kernels = _kernels()
    x = torch.randn(2 * PIECE + 512) * torch.logspace(-30, 30, 2 * PIECE + 512)
    x[256:512] = 0
    plain, compiled = (torch.zeros(form.nbytes(x.numel()), dtype=torch.uint8) for _ in range(2))
    assert torch.equal(pack(x, form, plain), pack(x, form, compiled, kernels))
    for add in (False, True):
        one, other = torch.ones_like(x), torch.ones_like(x)
        unpack(plain, form, one, add)
        unpack(plain, form, other, add, kernels)
        assert torch.equal(one, other)
    assert len(kernels.made) == 3
    x[5], x[PIECE + 7] = float("inf"), float("nan")
    unpack(pack(x, form, compiled, kernels), form, one, False, kernels)
    assert not one[:256].isfinite().any() and not one[PIECE : PIECE + 256].isfinite().any()
    assert one[256:PIECE].isfinite().all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("many", [*range(2, 9), 11])
def test_one_kernel_sums_all_rows(form: WireFormat, many: int) -> None:
    """In bits, as if they were added one after the other by PyTorch's ops."""
    kernels, count = _kernels(), PIECE + 512
    x = torch.randn(many, count) * torch.logspace(-30, 30, count)
    x[0, 0], x[1, 300], x[-1, 600], x[:, 1000:2000] = math.inf, math.nan, -math.inf, -0.0
    rows = torch.stack([packed(row, form) for row in x])
    for add in (False, True):
        one, other = (torch.full((count,), -0.0) for _ in range(2))
        for number, row in enumerate(rows):
            unpack(row, form, one, add or number > 0)
        unpack_sum(rows, form, other, add, kernels)
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    at_once = [ranges for *_, ranges in kernels.made]
    assert sorted(at_once) == ([many] * 2 if many <= MOST else [many - MOST, MOST, MOST])


def test_formats_that_no_kernel_serves() -> None:
    kernels = _kernels()
    for form in (WireFormat("bf16"), WireFormat("fp8_e4m3", 256), WireFormat("int8", 256, rotate=True)):
        assert kernels("pack", form) is None
    assert kernels("pack", WireFormat("int4", 256, stochastic=True)) is None and not kernels.made


def test_steps_use_them() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    params = {"w": torch.randn(1024, 512)}

    def main() -> Any:
        wire = fs.Wire("int8", "int8")
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], wire=wire)

        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            return (x @ p["w"]).square().mean()

        out = []
        for backend in (None, "inductor"):
            step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan, compile=backend)
            state = fs.init_state(plan, fs.optim.sgd(0.1), params=params)
            for number in range(2):
                rows = torch.randn(4, 1024, generator=torch.Generator().manual_seed(number))
                state, _ = step(state, rows)
            out.append(fs.unshard(state.params, plan)["w"])
        kernels: Any = packing_kernels(step.programs.cache)
        return torch.equal(*out), sorted(what for what, *_ in kernels.made)

    assert mesh.run(main) == [(True, ["add", "pack", "unpack", "unpack"])] * 2
