"""Which nodes of a graph draw random numbers."""

from typing import Any

import pytest
import torch
from torch import fx

from fshard.runtime.graphs.partition import draws, is_pure

ATEN = torch.ops.aten
FORWARDS = (
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
)
BACKWARDS = tuple(
    op
    for name in dir(ATEN)
    if "attention" in name and name.endswith("_backward")
    for op in (getattr(getattr(ATEN, name), overload) for overload in getattr(ATEN, name).overloads())
)


def node(op: Any, **given: Any) -> fx.Node:
    """A call of an operator, of which only these arguments count."""
    return fx.Graph().create_node("call_function", op, (), given)


@pytest.mark.parametrize("op", FORWARDS, ids=str)
def test_attention_draws_with_dropout_alone(op: Any) -> None:
    assert draws(node(op, dropout_p=0.1)) and not is_pure(node(op, dropout_p=0.1))
    assert not draws(node(op, dropout_p=0.0)) and not draws(node(op))


def test_backwards_of_attention_draw_nothing() -> None:
    """They get the mask's seed from the forward, and are tagged like draws by some kernels alone, on CUDA."""
    tagged = [op for op in BACKWARDS if torch.Tag.nondeterministic_seeded in op.tags]
    assert len(tagged) >= 2  # those of the memory-efficient kernel and of cuDNN
    assert not [str(op) for op in BACKWARDS if draws(node(op, dropout_p=0.1))]


@pytest.mark.parametrize("op", [ATEN.rand.default, ATEN.bernoulli.p, ATEN.native_dropout.default], ids=str)
def test_other_operators_draw(op: Any) -> None:
    assert draws(node(op)) and not is_pure(node(op))
