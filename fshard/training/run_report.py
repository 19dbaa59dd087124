"""The report of a step on one rank: its time, its arithmetic, and its waits for transfers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fshard.runtime.steps.pace import TRANSFERS, WAITS, waited
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class RunReport:
    """A report on a step on this rank.

    Attributes:
        seconds: from the call of the step to its last exchange.
        flops: floating-point operations of the model on this rank, as a trace counts them: forward and backward of all
            microbatches, without what ``remat=`` computes again. None where no trace has counted: the program depends
            on values of tensors, or the batch has other shapes than the one that was traced.
        device: where it computed.
        schedule: its schedule; None if it ran on demand.
        record: the ops that it ran.
        times: when each of them began, and when the last one was over.
        busy: by rank, the seconds since the end of the step before in which it did not wait for others; empty on one
            rank. The rank with the most is the one that others wait for.
        graph: with ``Policy(graph="step")`` how it ran: "replayed", "captured", or "eager" and the reason.
    """

    seconds: float = 0.0
    flops: int | None = None
    device: torch.device = field(default=torch.device("cpu"), repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    record: Sequence[Op] = field(default=(), repr=False)
    times: Sequence[float] = field(default=(), repr=False)
    busy: Sequence[float] = field(default=(), repr=False)
    graph: str = ""

    @property
    def slowest(self) -> int | None:
        """The rank that was busy longest; None on one rank."""
        return self.busy.index(max(self.busy)) if self.busy else None

    @functools.cached_property
    def exposed(self) -> float | None:
        """Seconds in which the step waited for other ranks: for transfers, sums of what has arrived included, and where
        ranks meet, at its begin and its end.

        None where they are not known: the step ran on demand or left its schedule, or runs on a device that the host
        runs ahead of.
        """
        ops = self.record
        if self.device.type != "cpu" or self.schedule is None or len(self.times) != len(ops) + 1:
            return None
        return waited(ops, self.times, WAITS if self.busy else TRANSFERS)
