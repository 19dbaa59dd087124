"""Operations that PyTorch's table does not count are those of the same products, written otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.runtime.engine.flops import formula

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
    assert counted(lambda p: torch.mv(p["w"], torch.ones(5)).sum(), params) == 2 * 30  # its gradient is no product
    assert counted(lambda p: torch.addmv(p["b"], p["w"], torch.ones(5)).sum(), params) == 2 * 30


ones, ops = torch.ones, torch.ops.aten
CUDNN = [ones(4, 5), ones(4, 1), ones(4)]
"""Weights of a layer of one unit, and its bias."""

BY_SHAPES: list[tuple[Any, tuple[Any, ...], int]] = [
    (ops._grouped_mm.default, (ones(6, 4), ones(3, 4, 5)), 2 * 6 * 4 * 5),
    (ops._grouped_mm.default, (ones(3, 6, 4), ones(4, 5)), 2 * 6 * 4 * 5),
    (ops._grouped_mm.default, (ones(6, 4), ones(4, 5)), 2 * 6 * 4 * 5),
    (ops._grouped_mm.default, (ones(3, 6, 4), ones(3, 4, 5)), 3 * 2 * 6 * 4 * 5),
    (ops._scaled_grouped_mm.default, (ones(6, 4), ones(3, 4, 5), ones(6), ones(3)), 2 * 6 * 4 * 5),
    (ops._int_mm.default, (ones(6, 4), ones(4, 5)), 2 * 6 * 4 * 5),
    (ops.addbmm.default, (ones(6, 5), ones(3, 6, 4), ones(3, 4, 5)), 3 * 2 * 6 * 4 * 5),
    (ops._cudnn_rnn.default, (ones(7, 2, 5), CUDNN, 3), 2 * 7 * 2 * (4 * 5 + 4)),
    (ops._cudnn_rnn_backward.default, (ones(7, 2, 5), CUDNN, 3), 2 * 2 * 7 * 2 * (4 * 5 + 4)),
    (ops.miopen_rnn.default, (ones(14, 5), CUDNN, 3), 2 * 7 * 2 * (4 * 5 + 4)),
    (ops.miopen_rnn_backward.default, (ones(14, 5), CUDNN, 3), 2 * 2 * 7 * 2 * (4 * 5 + 4)),
]
if hasattr(ops, "_foreach_mm"):  # since PyTorch 2.13
    BY_SHAPES.append((ops._foreach_mm.default, ([ones(6, 4), ones(2, 3)], [ones(4, 5), ones(3, 7)]), 2 * (120 + 42)))


@pytest.mark.parametrize(("op", "args", "flops"), BY_SHAPES, ids=[str(op) for op, *_ in BY_SHAPES])
def test_operators_that_not_every_machine_has(op: Any, args: tuple[Any, ...], flops: int) -> None:
    """By the shapes of their arguments, as PyTorch calls them."""
    count = formula(op)
    assert count is not None and count(*args, out_val=None) == flops
