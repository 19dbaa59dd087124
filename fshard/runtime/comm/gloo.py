"""Lanes over gloo."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.errors import CommError
from fshard.runtime.comm.lanes import Handle, Marks, Sizes, bring
from fshard.runtime.comm.pending import Pending, all_gather


@dataclass(frozen=True)
class GlooLane:
    """A gloo communicator.

    gloo's own reduce-scatter is an all-reduce: twice the bytes, and it runs inside ``wait``. Here every rank sends each
    peer its chunk and adds what it receives, in rank order: the fewest bytes, and the same sum on every run.
    """

    name: str
    size: int
    group: Any

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """Ring all-gather on gloo's own thread."""
        return self._issue("all-gather", lambda: all_gather(out, shard, self.group))

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """All-to-all into ``stage``, then one sum over ranks."""
        rows = list(stage.view(self.size, -1))
        return self._issue(
            "reduce-scatter",
            lambda: dist.all_to_all_single(stage, full, group=self.group, async_op=True),
            lambda: bring(out, rows, add),
        )

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """Ring all-reduce in place."""
        return self._issue("all-reduce", lambda: dist.all_reduce(buffer, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Marks = ()) -> Handle:
        """All-to-all; chunks may be empty."""
        call = functools.partial(dist.all_to_all_single, out, full, receive, send, group=self.group, async_op=True)
        return self._issue("all-to-all", call)

    def _issue(self, what: str, start: Callable[[], Any], finish: Callable[[], object] | None = None) -> Handle:
        describe = f"{what} on {self.name}"
        try:
            return Pending(start(), describe, finish)
        except RuntimeError as error:
            raise CommError(f"{describe} failed: {str(error).splitlines()[0]}") from error
