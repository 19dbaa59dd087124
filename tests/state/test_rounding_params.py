"""Initial values of another dtype than the plan's: a wider one takes them, a narrower one is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs

TAKES: dict[str, Callable[[Any, fs.Plan], Any]] = {
    "params": lambda tree, plan: fs.init_state(plan, fs.optim.sgd(0.1), params=tree).params,
    "shards": lambda tree, plan: fs.init_state(plan, fs.optim.sgd(0.1), shards=fs.tree.map(_flat, tree)).params,
    "full": lambda tree, plan: fs.shard(tree, plan),
}


def _flat(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.flatten()


def plan_of(dtype: torch.dtype) -> fs.Plan:
    """A plan of one leaf of this dtype."""
    params = {"a": {"w": torch.ones(2, 2, dtype=dtype)}}
    return fs.make_plan(params, fs.make_mesh((1,), ("data",)), [fs.Rule(".*", fs.fsdp("data"), trainable=False)])


@pytest.mark.parametrize("what", TAKES)
@pytest.mark.parametrize(
    ("have", "want"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.float32),
        (torch.complex64, torch.float32),
        (torch.float32, torch.int64),
        (torch.int64, torch.int32),
    ],
)
def test_values_that_would_be_rounded_are_refused(what: str, have: torch.dtype, want: torch.dtype) -> None:
    given = {"a": {"w": torch.ones(2, 2, dtype=have)}}
    with pytest.raises(fs.errors.TreeError, match=rf"{what} .*would round:\n  a\.w: {have}, the plan has {want}"):
        TAKES[what](given, plan_of(want))


@pytest.mark.parametrize("what", TAKES)
@pytest.mark.parametrize(
    ("have", "want"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.int32, torch.int64)],
)
def test_values_that_the_dtype_holds_are_taken(what: str, have: torch.dtype, want: torch.dtype) -> None:
    given = {"a": {"w": torch.arange(4).view(2, 2).to(have)}}
    taken = TAKES[what](given, plan_of(want))["a"]["w"]
    assert taken.dtype == want and taken.tolist() == [0, 1, 2, 3]
