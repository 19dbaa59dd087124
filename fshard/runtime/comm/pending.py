"""c10d collectives in flight."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.errors import CommError, ShardError

SOURCE = re.compile(r"^\[/[^]]*\] ")
"""gloo's own file and line at the start of its errors."""

ADVICE = " This is typically caused by"
"""Begins what gloo says to everybody."""

CLOSED = re.compile(r"[Cc]onnection (closed|reset) by|Broken pipe")
"""gloo's errors of connections whose other end has ended."""

GONE = "has closed its connection"
"""A part of the text of errors of a rank that has ended, or given up."""


@contextmanager
def naming_errors(describe: str, rank: int | None = None) -> Iterator[str]:
    """Turn errors of the transport into a ``CommError`` that names the collective and the rank."""
    try:
        yield describe
    except ShardError:
        raise
    except (RuntimeError, OSError) as error:
        text = SOURCE.sub("", (str(error).splitlines() or [type(error).__name__])[0]).partition(ADVICE)[0]
        if rank is not None and CLOSED.search(text):
            raise CommError(f"{describe} failed: rank {rank} {GONE}: it ended or failed") from error
        peer = "" if rank is None else f"rank {rank} is gone, stuck, or at another collective: "
        raise CommError(f"{describe} failed: {peer}{text}") from error


@dataclass(frozen=True)
class PendingWork:
    """A c10d collective in flight, and a function that computes the result from the received data."""

    work: Any
    describe: str
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait at most as long as the communicator's timeout, then finish."""
        with naming_errors(self.describe):
            self.work.wait()
        if self.finish is not None:
            self.finish()


# PyTorch 2.13 renamed the two collectives on flat tensors and deprecates the old names, which 2.11 and 2.12 have.
def all_gather(out: Tensor, shard: Tensor, group: Any) -> Any:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, shard, group=group, async_op=True)


def reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, group=group, async_op=True)
