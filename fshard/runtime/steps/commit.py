"""The end of a step: one exchange in which all ranks learn the loss, the norm, and whether all of them made it."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.errors import unlike_losses
from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.engine.loss import Mean, number

OK, FAILED, RETRY, CUT = 0, 1, 2, 3
"""How a rank's own part of a step went. ``RETRY``: its program left the schedule. ``CUT``: a collective of its program
has failed, most likely because another rank's program is over."""


@dataclass(frozen=True)
class Tally:
    """What one rank brings to the vote, summed over its microbatches. ``means``: how many other numbers are to be
    averaged, and a hash of their names, without which numbers of different names would be averaged together."""

    status: int = OK
    sumsq: float = 0.0
    total: float = 0.0
    count: float = 0.0
    weighted: bool = False
    means: tuple[int, int] = (0, 0)
    stop: bool = False


@dataclass(frozen=True)
class Verdict:
    """What all ranks learn. Equal on all of them, bit for bit: rows are added in rank order.

    Attributes:
        status: of each rank.
        loss: the global mean.
        norm: of the gradient of that mean, over all leaves and ranks.
        scale: what the sums of gradients are multiplied by to become gradients of the mean.
        stop: whether a rank asks all of them to stop after this step.
        count: of elements of the global batch, if the loss is an ``fs.Mean``, else 0.
    """

    status: tuple[int, ...]
    loss: float
    norm: float
    scale: float
    stop: bool = False
    count: float = 0.0

    @property
    def worst(self) -> int:
        """``FAILED`` if any rank failed, else ``RETRY`` if any must, else ``FAILED`` if any was cut off."""
        if FAILED in self.status:
            return FAILED
        if RETRY in self.status:
            return RETRY
        return FAILED if CUT in self.status else OK


def vote(comm: Communicator, tally: Tally, parts: int, copies: int, divided: float) -> Verdict:
    """Exchange the tallies of all ranks.

    Args:
        communicator: the control communicator over the whole mesh.
        tally: this rank's.
        parts: microbatches of the global batch, over ranks and accumulation.
        copies: how many ranks work on the same part.
        divided: what gradients were divided by: the parts, unless the loss was scaled or a short dtype needs otherwise.
    """
    mine = [float(tally.status), tally.sumsq, tally.total, tally.count, float(tally.weighted)]
    mine += [*map(float, tally.means), float(tally.stop)]
    rows = [mine]
    if comm.size > 1:
        rows = exchange(comm, torch.tensor(mine, dtype=torch.float64, device="cpu")).tolist()
    status = tuple(int(row[0]) for row in rows)
    if not any(status) and len({tuple(row[4:7]) for row in rows}) > 1:
        raise unlike_losses([(bool(row[4]), int(row[5]), int(row[6])) for row in rows])
    sumsq, total, count = (math.fsum(row[i] for row in rows) for i in (1, 2, 3))
    loss = total / count if count else math.nan
    scale, elements = divided / parts, 0.0
    if any(row[4] for row in rows):
        scale, elements = divided * copies / count if count else math.nan, count / copies
    norm = scale * math.sqrt(sumsq) if sumsq >= 0 else math.nan
    return Verdict(status, loss, norm, scale, any(row[7] for row in rows), elements)


def average(comm: Communicator, means: Sequence[Mean], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The exact global means of auxiliary values, of these dtypes or float32: one exchange for all of them."""
    if not means:
        return []
    mine = [number(part) for mean in means for part in (mean.total, mean.count)]
    summed = exchange(comm, torch.tensor(mine, dtype=torch.float64, device="cpu")).sum(0).view(-1, 2)
    return [(total / count).to(widened([dtype])) for (total, count), dtype in zip(summed, dtypes, strict=True)]


def widened(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The widest of these dtypes and float32: that of a number which they make together."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number that all ranks know as a tensor. What is too large for its dtype is infinite.

    >>> scalar(1e300, torch.float64), scalar(1e300, torch.float32)
    (tensor(1.0000e+300, dtype=torch.float64), tensor(inf))
    """
    try:
        return torch.scalar_tensor(value, dtype=dtype, device="cpu")
    except RuntimeError:  # it is too large
        return torch.scalar_tensor(value, dtype=torch.float64, device="cpu").to(dtype)
