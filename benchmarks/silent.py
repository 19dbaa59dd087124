"""One rank of many over PyTorch's fake process group, whose collectives send nothing: numbers stay finite nevertheless.

In PyTorch 2.11 its reduce-scatter and all-to-all leave their outputs as they were, which may be anything, and a step
whose norm is not finite fails.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fshard.runtime.comm import nccl


def join(world: int) -> None:
    """Be rank 0 of a group of so many. What it receives from now on is a part of what it sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    reduce = nccl.reduce_scatter

    def reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Any:
        work = reduce(out, full, group)
        out.copy_(full.view(-1)[: out.numel()])
        return work

    nccl.reduce_scatter = reduce_scatter
    nccl.dist = Silent  # type: ignore[assignment, attr-defined]


class Silent:
    """What the communicators call of torch.distributed besides."""

    @staticmethod
    def all_to_all_single(out: Tensor, full: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The group's own call; the output is what was sent."""
        work = dist.all_to_all_single(out, full, *args, **kwargs)
        out.copy_(full[: out.numel()])
        return work

    @staticmethod
    def all_reduce(buffer: Tensor, **kwargs: Any) -> Any:
        """The group's own call, which leaves the buffer as it is."""
        return dist.all_reduce(buffer, **kwargs)
