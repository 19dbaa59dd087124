"""Norms of shards: those of each tensor alone, bit for bit, in as few operators as dtypes allow."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.runtime.memory.gradients import norms_of


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtypes", "most"),
    [
        ([torch.bfloat16, torch.bfloat16, torch.float16], 1),
        ([torch.float32, torch.float64], 1),
        ([torch.bfloat16, torch.float64, torch.float32, torch.bfloat16], 2),
    ],
)
def test_one_operator(dtypes: list[torch.dtype], most: int) -> None:
    shards = [(300 * torch.randn(1000 + number)).to(dtype) for number, dtype in enumerate(dtypes)]
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    with Counted() as counted:
        found = norms_of(shards)
    assert counted.count == most
    for shard, norm in zip(shards, found, strict=True):
        assert torch.equal(norm, torch.linalg.vector_norm(shard, dtype=wide.get(shard.dtype, shard.dtype)))
