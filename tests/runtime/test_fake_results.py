"""Results that the fake mode makes again are those of PyTorch's own, whatever the call before was like."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fshard import tree
from fshard.runtime.engine.fake_fallback import KernelFakeMode, quiet
from fshard.runtime.engine.fake_results import seen
from fshard.torch_internals import FakeTensorMode, dispatch_keys

Call = Callable[[Tensor, Tensor], Any]

CALLS: dict[str, Call] = {
    "mul": lambda x, y: x * y,
    "scalars": lambda x, y: (x + 1, x + True, x.int() + 1, x.int() + 1.0, x.int() / 2, x.bool() + 1),
    "matmul": lambda x, y: (x @ y.t(), nn.functional.linear(x, y), torch.bmm(x[None], y.t()[None])),
    "views": lambda x, y: (x.view(-1), x.t(), x[:, 1:], x[None].expand(3, -1, -1), x.detach(), x.unbind(1)),
    "pieces": lambda x, y: (x.split(2, 1), x.chunk(2), torch.cat([x, y]), torch.stack([x, x])),
    "dtypes": lambda x, y: (x.to(x.dtype), x.to(torch.float64), x.bfloat16().float(), x.view(torch.int32)),
    "alike": lambda x, y: (x.contiguous(), x.t().contiguous(), x.reshape(4, 3), x.t().reshape(12), x.clone()),
    "in place": lambda x, y: (x.add_(y), x.zero_(), x.copy_(y[:1]), x[0].mul_(2), x.t().add_(1)),
    "norms": lambda x, y: (
        nn.functional.layer_norm(x, (4,)),
        nn.functional.rms_norm(x, (4,)),
        x.softmax(1),
        torch.std_mean(x, 1),
    ),
    "strides": lambda x, y: (x.as_strided((2, 2), (1, 2), 1), x[1:].as_strided((2, 2), (4, 1)), x.flip(0)),
    "made": lambda x, y: (x.new_zeros(5), torch.zeros_like(x.t()), torch.full_like(x, 2, dtype=torch.int64)),
    "foreach": lambda x, y: (torch._foreach_add_([x, y], [y, x]), torch._foreach_mul([x, y.t()], 2.0)),
    "draws": lambda x, y: (nn.functional.dropout(x), torch.rand_like(x), x.bernoulli_(0.5)),
    "several": lambda x, y: (x.max(1), x.topk(2), torch.native_layer_norm(x, [4], None, None, 1e-5)),
    "complex": lambda x, y: (torch.complex(x, y).conj().imag, torch.view_as_complex(x.view(3, 2, 2)).conj() * 2),
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
}


def looks(x: Any, storages: dict[int, int]) -> Any:
    """What is known of a result: its own numbers, and which results and arguments it shares memory with."""
    if not isinstance(x, Tensor):
        return x
    storage = x.untyped_storage()
    number = storages.setdefault(storage._cdata, len(storages))
    flags = x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference(), str(dispatch_keys(x))
    return (*x.shape, "|", *x.stride()), x.storage_offset(), x.dtype, x.device, storage.nbytes(), number, flags


def run(call: Call, mode: FakeTensorMode, dtype: torch.dtype, turned: bool) -> list[Any]:
    """What the results of a call look like in a mode."""
    with mode:
        x, y = torch.empty(3, 4, dtype=dtype), torch.empty(3, 4, dtype=dtype)
        x = x.t().contiguous().t() if turned else x
        storages: dict[int, int] = {}
        kept = [x, y, call(x, y)]
        return [looks(leaf, storages) for leaf in tree.leaves(kept)]


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """No call of another test is known."""
    seen.cache_clear()
    yield
    seen.cache_clear()


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_pytorch(name: str) -> None:
    """At first, from memory, with other dtypes and strides between, and in inference mode."""
    for turned in (False, True):
        if turned and name in ("views", "pieces", "alike", "dtypes", "complex", "strides"):
            continue  # these ask for rows that are contiguous
        for dtype in (torch.float32, torch.float64) if name not in ("dtypes", "complex") else (torch.float32,):
            modes = (nullcontext, torch.inference_mode)
            for around in modes if dtype is torch.float32 else modes[::-1]:
                with around():
                    plain = FakeTensorMode()
                    plain.cache_enabled = False
                    wanted = run(CALLS[name], plain, dtype, turned)
                    assert run(CALLS[name], KernelFakeMode(), dtype, turned) == wanted
                    assert run(CALLS[name], KernelFakeMode(), dtype, turned) == wanted


def test_a_second_call_runs_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is not asked of PyTorch again, by this mode or the next."""
    run(CALLS["matmul"], KernelFakeMode(), torch.float32, False)

    def refused(self: Any, func: Any, *others: Any) -> Any:
        if func.namespace == "aten" and func is not torch.ops.aten.empty.memory_format:
            raise AssertionError(str(func))
        return ran(self, func, *others)

    ran = KernelFakeMode._run
    monkeypatch.setattr(KernelFakeMode, "_run", refused)
    run(CALLS["matmul"], KernelFakeMode(), torch.float32, False)


def test_the_default_dtype_counts() -> None:
    """Integers divided are of the dtype that torch makes of them now."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            with KernelFakeMode():
                found.append((torch.ones(2, dtype=torch.int64) / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64, torch.float32]


def test_constants_and_errors_are_not_remembered() -> None:
    """A constant has its value, a wrong shape its error, as often as they are asked for."""
    for value in (2.0, 3.0):
        with KernelFakeMode():
            assert (torch.empty(()) + torch.empty(())).shape == ()
            assert float(torch.tensor(value) + torch.tensor(1.0)) == value + 1
            x = torch.empty(3, 4)
            with quiet(), pytest.raises(RuntimeError, match="reduction dim"):
                x @ x


def test_no_tensor_is_kept() -> None:
    """The memory holds descriptions: storages end with the tensors of a trace."""
    with KernelFakeMode():
        x = torch.empty(3, 4)
        kept = [weakref.ref(one.untyped_storage()) for one in (x, x @ x.t(), x + 1, x.view(-1), x.add_(1))]
        del x
    assert seen.cache_info().currsize
    assert not [one for one in kept if one() is not None]
