"""What decides how a graph is made, beside the unit and its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fshard.runtime.graphs.cache import _settings
from fshard.runtime.graphs.inductor import _from_cpp

KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_of_attention_is_part_of_the_key(kernel: SDPBackend) -> None:
    usual = _settings()
    with sdpa_kernel([other for other in KERNELS if other is not kernel]):
        assert _settings() != usual
    assert _settings() == usual


def test_their_order_is_part_of_the_key() -> None:
    with sdpa_kernel(KERNELS, set_priority=True):
        first = _settings()
    with sdpa_kernel(KERNELS[::-1], set_priority=True):
        assert _settings() != first


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False)])
def test_kernels_are_called_from_cpp_on_the_cpu_alone(device: str, expected: bool) -> None:
    def node(where: str) -> Any:
        return SimpleNamespace(meta={"val": SimpleNamespace(device=torch.device(where))})

    joint: Any = SimpleNamespace(leaves=[node("cpu")], inputs=[node(device)])
    assert _from_cpp(joint) is expected
