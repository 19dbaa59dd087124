"""Communicators over NCCL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard.errors import CommError
from fshard.forks import keep, own
from fshard.runtime.comm.communicator import CLOSED, Events, Handle, Sizes
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.pending import (
    FAILURES,
    PendingWork,
    all_gather,
    all_gathers,
    all_reduce,
    all_to_all,
    named,
    reduce_scatter,
)
from fshard.runtime.comm.row_sums import sum_rows


@dataclass(eq=False)
class NcclCommunicator:
    """An NCCL communicator with a side stream. On hardware, only groups of one rank have run.

    ``wait`` does not block the host: it makes the compute stream wait. So a collective that a rank never comes to ends
    for the others only when they abort it, which ranks learn to do before they read their devices.

    Attributes:
        key: names the communicator in failure notes.
        closed: why it can no longer be used.
    """

    name: str
    size: int
    group: Any
    stream: Stream
    key: str = ""
    closed: str = ""

    def __post_init__(self) -> None:
        own(self)

    def disown(self, why: str) -> None:
        """Take no more collectives."""
        keep([self.close(why)])

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """NCCL all-gather on this communicator's stream."""
        return self._issue("all-gather", all_gather, (out, shard), after)

    def all_gathers(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        """Several all-gathers as one."""
        return self._issue("all-gather", all_gathers, (outs, shards), None)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """NCCL reduce-scatter on this communicator's stream, into ``stage`` if it adds to ``out``.

        NCCL adds in the dtype of ``full``. If ``out`` has another one, ranks exchange rows and add them here.
        """
        if full.dtype != out.dtype:
            rows = stage[: full.numel()]
            finish = lambda: sum_rows(out, rows.view(self.size, -1), add)  # noqa: E731
            return self._issue("reduce-scatter", all_to_all, (rows, full, (), ()), after, finish)
        target = stage[: out.numel()] if add else out
        return self._issue(
            "reduce-scatter", reduce_scatter, (target, full), after, (lambda: out.add_(target)) if add else None
        )

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """NCCL all-reduce on this communicator's stream."""
        return self._issue("all-reduce", all_reduce, (buffer,), after)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """NCCL all-to-all on this communicator's stream."""
        return self._issue("all-to-all", all_to_all, (out, full, receive or (), send or ()), after)

    def close(self, reason: str = "") -> Any:
        """Take no more collectives. Returns the process group, which the caller aborts; None if that was done."""
        self.closed = self.closed or reason or CLOSED
        group, self.group = self.group, None
        return group

    def _issue(
        self,
        call: str,
        start: Callable[..., Any],
        given: tuple[Any, ...],
        after: Events,
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        """Issue a collective on the group. Its errors name it.

        NCCL's own stream waits for the current one at the call. The side stream stands in its place where a collective
        waits for events alone.

        Another thread may close the communicator: the group is read once, and where it is None, torch.distributed would
        take the default group.
        """
        group = self.group
        if self.closed or group is None:
            raise CommError(f"{call} on {self.name} failed: it is closed: {self.closed}")
        try:
            if after is None:
                return PendingWork(start(*given, group), call, self.name, finish)
            with self.stream.after(after):
                return PendingWork(start(*given, group), call, self.name, finish)
        except FAILURES as error:
            raise named(error, f"{call} on {self.name}") from error
