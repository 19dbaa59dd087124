"""c10d collectives in flight."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.errors import CommError, ShardError
from fshard.torch_internals import group_method

Tensors = Sequence[Tensor]

SOURCE = re.compile(r"^\[/[^]]*\] ")
"""gloo's own file and line at the start of its errors."""

ADVICE = " This is typically caused by"
"""Begins what gloo says to everybody."""

CLOSED = re.compile(r"[Cc]onnection (closed|reset) by|Broken pipe")
"""gloo's errors of connections whose other end has ended."""

FAILURES = (RuntimeError, OSError)
"""Types of errors that transports raise."""

GONE = "has closed its connection"
"""A part of the text of errors of a rank that has ended, or given up."""


@contextmanager
def naming_errors(describe: str, rank: int | None = None) -> Iterator[str]:
    """Turn errors of the transport into a ``CommError`` that names the collective and the rank."""
    try:
        yield describe
    except FAILURES as error:
        raise named(error, describe, rank) from error


def named(error: Exception, describe: str, rank: int | None = None) -> CommError:
    """The ``CommError`` of an error of the transport. Raises one of the package as it is."""
    if isinstance(error, ShardError):
        raise error
    text = SOURCE.sub("", (str(error).splitlines() or [type(error).__name__])[0]).partition(ADVICE)[0]
    if rank is not None and CLOSED.search(text):
        return CommError(f"{describe} failed: rank {rank} {GONE}: it ended or failed")
    peer = "" if rank is None else f"rank {rank} is gone, stuck, or at another collective: "
    return CommError(f"{describe} failed: {peer}{text}")


@dataclass(slots=True)
class PendingWork:
    """A c10d collective in flight, and a function that computes the result from the received data."""

    work: Any
    call: str
    comm: str
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait at most as long as the communicator's timeout, then finish."""
        try:
            self.work.wait()
        except FAILURES as error:
            raise named(error, f"{self.call} on {self.comm}") from error
        if self.finish is not None:
            self.finish()


# A method of the group itself is a third of the calls of torch.distributed's function, which checks what is known here.
def all_gather(out: Tensor, shard: Tensor, group: Any) -> Any:
    return group_method(group, "all_gather_single")(out, shard, _options("AllgatherOptions"))


def all_gathers(outs: Tensors, shards: Tensors, group: Any) -> Any:
    start = group_method(group, "all_gather_single_coalesced")
    return start(outs, shards, _options("AllgatherOptions"))


def reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Any:
    start = group_method(group, "reduce_scatter_single")
    return start(out, full, _options("ReduceScatterOptions"))


def all_reduce(buffer: Tensor, group: Any) -> Any:
    return group.allreduce([buffer], _options("AllreduceOptions"))


def all_to_all(out: Tensor, full: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Any:
    start = group_method(group, "all_to_all_single")
    return start(out, full, receive, send, _options("AllToAllOptions"))


@functools.cache
def _options(kind: str) -> Any:
    """Options of a collective that the caller does not wait for."""
    made = getattr(dist.distributed_c10d, kind)()
    made.asyncOp = True
    return made
