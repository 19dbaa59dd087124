"""Operations that PyTorch's table does not count are those of the same products, written otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs

TIMES = 3
"""A forward, and the gradients of both factors."""


def counted(loss: Callable[[Any], Tensor], params: Any) -> int:
    mesh = fs.abstract_mesh((1,), ("data",))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])
    step = fs.make_train_step(lambda p, x: loss(p), fs.optim.sgd(0.1), plan)
    flops = step.trace(torch.ones(1)).flops
    assert flops is not None
    return flops


def test_experts() -> None:
    """Each row meets one expert, however many there are."""
    params = {"x": torch.randn(32, 16), "w": torch.randn(4, 16, 8)}
    ends = torch.tensor([8, 8, 20, 32], dtype=torch.int32)

    def loss(p: Any) -> Tensor:
        return torch._grouped_mm(p["x"].bfloat16(), p["w"].bfloat16(), offs=ends).float().square().mean()

    assert counted(loss, params) == TIMES * 2 * 32 * 16 * 8


@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_nets(layers: int) -> None:
    torch.manual_seed(0)
    model = fs.split(nn.LSTM(5, 7, layers))
    x = torch.randn(3, 4, 5)
    weights = sum([w.numel() for w in fs.tree.leaves(model.params) if w.ndim == 2])
    found = counted(lambda p: model.apply(p, x)[0].square().mean(), model.params)
    assert found == TIMES * 2 * 3 * 4 * weights


def test_matrix_times_vector() -> None:
    params = {"w": torch.randn(6, 5), "b": torch.randn(6)}
    assert counted(lambda p: torch.mv(p["w"], torch.ones(5)).sum(), params | {}) >= 2 * 30
    assert counted(lambda p: torch.addmv(p["b"], p["w"], torch.ones(5)).sum(), params) >= 2 * 30
