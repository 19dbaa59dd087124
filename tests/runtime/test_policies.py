"""Policies of recomputation: what each keeps, counted in operators that run."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fshard import checkpoint_policies as policies
from fshard.errors import PlanError

aten = torch.ops.aten


class Count(TorchDispatchMode):
    """Counts calls of operators by their name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket] = self.calls.get(func.overloadpacket, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "products", "sines"),
    [
        (policies.nothing, 8, 3),
        (policies.dots, 6, 3),
        (policies.saving(aten.sin), 8, 2),
        (policies.everything, 6, 2),
    ],
    ids=repr,
)
def test_what_is_kept_is_not_computed_again(policy: policies.SavePolicy, products: int, sines: int) -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x @ w) @ w).sum()

    with Count() as count:  # the last sine is not needed again: nothing reads it
        checkpoint(body, w, x, use_reentrant=False, context_fn=policy.contexts()).backward()
    assert (count.calls[aten.mm], count.calls[aten.sin]) == (products, sines)


def test_policies_are_values_with_names() -> None:
    assert policies.saving(aten.mm) == policies.saving(aten.mm.default)
    assert {repr(policies.nothing), repr(policies.dots)} == {
        "fs.checkpoint_policies.nothing",
        "fs.checkpoint_policies.dots",
    }
    assert policies.dots.saves(aten.addmm.default) and not policies.dots.saves(aten.gelu.default)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(PlanError, match="torch.ops"):
        policies.saving(torch.sin)
    with pytest.raises(PlanError, match="torch.ops"):
        policies.saving()
