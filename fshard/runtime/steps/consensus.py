"""The end of a step: one read of the device and one exchange tell all ranks the loss, the norm, and who failed."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.engine.loss import Mean, fingerprint, means_of, no_aux
from fshard.runtime.memory.norms import DTYPE
from fshard.runtime.steps.refusals import unlike_losses

OK, FAILED, RETRY, CUT, STARVED = 0, 1, 2, 3, 4
"""How a rank's own part of a step went. ``RETRY``: its program left the schedule. ``CUT``: a collective of its program
has failed, most likely because another rank's program is over. ``STARVED``: there was too little memory for a policy
that is only being timed."""

HEAD = 8
"""Numbers of a row that every step sends."""

MEANS = 16
"""Auxiliary means that travel in the row. Further ones take an exchange of their own."""

RuleNorms = Sequence[tuple[float, Tensor]]
"""Norms of gradients, 0-dim, each after the part of its elements that this rank counts."""


@dataclass(frozen=True)
class Tally:
    """What one rank brings to the consensus, summed over its microbatches.

    Attributes:
        status: how its part went.
        sumsq: its part of the squared norm of the summed gradients; each element counts once over all ranks.
        total: the sum of its losses.
        count: of their elements.
        weighted: whether the loss is an ``fs.Mean``.
        named: how many auxiliary means it has, and a hash of their names.
        stop: whether it asks all ranks to stop.
        rules: its part of the squared norm of each clipping rule's leaves.
        means: the total and the count of each auxiliary mean, one behind the other.
    """

    status: int = OK
    sumsq: float = 0.0
    total: float = 0.0
    count: float = 0.0
    weighted: bool = False
    named: tuple[int, int] = (0, 0)
    stop: bool = False
    rules: tuple[float, ...] = ()
    means: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """This rank's own loss; 0 where it has none."""
        return self.total / self.count if self.count else 0.0


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
        rules: the norm of the sums of gradients of each clipping rule's leaves; empty unless it was asked for.
        means: the global mean of each auxiliary mean.
        told: the numbers of each rank that are not summed.
    """

    status: tuple[int, ...]
    loss: float
    norm: float
    scale: float
    stop: bool = False
    count: float = 0.0
    rules: tuple[float, ...] = ()
    means: tuple[float, ...] = field(default=(), repr=False)
    told: Sequence[Sequence[float]] = field(default=(), repr=False)

    @property
    def worst(self) -> int:
        """``FAILED`` if any rank failed, else what any must make again, else ``FAILED`` if any was cut off."""
        for status in (FAILED, RETRY, STARVED):
            if status in self.status:
                return status
        return FAILED if CUT in self.status else OK


def tally(
    norms: Sequence[tuple[float, Tensor]],
    rules: Sequence[RuleNorms],
    losses: Sequence[tuple[Tensor, Tensor | float]],
    aux: Sequence[Any],
    weighted: bool,
    stop: bool,
) -> Tally:
    """Read what a rank has measured: the only time that a step waits for its device.

    Args:
        norms: the norm of each group's gradient, 0-dim, after the part of its elements that this rank counts.
        rules: the same for the leaves of each clipping rule.
        losses: the total and the count of each microbatch.
        aux: the auxiliary values of each microbatch.
        weighted: whether the loss is an ``fs.Mean``.
        stop: whether this rank asks all ranks to stop.
    """
    means, named = _named_means(aux)
    values: list[Tensor | float] = [norm for _, norm in norms]
    values += [norm for rule in rules for _, norm in rule]
    values += [part for loss in losses for part in loss]
    values += [part for row in means for mean in row for part in (mean.total, mean.count)]
    numbers = read(values)

    def squares(shares: RuleNorms) -> float:
        return _sum([share * norm * norm for (share, _), norm in zip(shares, numbers, strict=False)])

    def sums(parts: int) -> tuple[float, ...]:
        pairs = [(next(numbers), next(numbers)) for _ in range(parts)]
        return tuple(map(sum, zip(*pairs, strict=True))) if pairs else (0.0, 0.0)

    sumsq, by_rule = squares(norms), tuple([squares(rule) for rule in rules])
    total, count = sums(len(losses))
    summed = tuple([number for row in means for number in sums(len(row))])
    return Tally(OK, sumsq, total, count, weighted, named, stop, by_rule, summed)


def _named_means(aux: Sequence[Any]) -> tuple[list[list[Mean]], tuple[int, int]]:
    """The means of all microbatches, a row for each; and how many they are, with a hash of their names."""
    if all(map(no_aux, aux)):
        return [], (0, 0)
    return [list(row) for row in zip(*map(means_of, aux), strict=True)], fingerprint(aux)


def read(values: Sequence[Tensor | float]) -> Iterator[float]:
    """0-dim tensors and numbers as floats, by one read of each device.

    >>> [*read([torch.tensor(1.5), 2, torch.tensor(3)])]
    [1.5, 2.0, 3.0]
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(value)
    numbers = {device: iter(_stacked(tensors)) for device, tensors in by_device.items()}
    return iter([next(numbers[value.device]) if isinstance(value, Tensor) else float(value) for value in values])


def _stacked(tensors: Sequence[Tensor]) -> list[float]:
    """Single numbers on one device, by one read."""
    if any([not dtype.is_floating_point for dtype in set(map(DTYPE, tensors))]):
        tensors = [x if x.is_floating_point() else x.double() for x in tensors]  # the stack would round large integers
    if any(map(NDIM, tensors)):
        tensors = [x.reshape(()) for x in tensors]
    found: list[float] = torch.stack([*tensors]).detach().tolist()
    return found


NDIM = operator.attrgetter("ndim")


def consensus(
    comm: Communicator, mine: Tally, parts: int, copies: int, divided: float, rules: int = 0, own: Sequence[float] = ()
) -> Verdict:
    """Exchange the tallies of all ranks.

    Args:
        comm: the control communicator over the whole mesh.
        mine: this rank's.
        parts: microbatches of the global batch, over ranks and accumulation.
        copies: how many ranks work on the same part.
        divided: what gradients were divided by: the parts, unless the loss was scaled or a short dtype needs otherwise.
        rules: for how many clipping rules there are norms.
        own: numbers that are not summed, but told by rank; as many on all ranks.

    Raises:
        LossError: losses or auxiliary means differ in kind between ranks; on all of them alike.
    """
    row = [mine.status, mine.sumsq, mine.total, mine.count, mine.weighted, *mine.named, mine.stop]
    row += [*mine.rules, *[0.0] * (rules - len(mine.rules)), *mine.means[: 2 * MEANS]]
    width = HEAD + rules + 2 * MEANS
    rows = _exchanged(comm, [*row, *[0.0] * (width - len(row)), *own], width + len(own))
    status = tuple([int(row[0]) for row in rows])
    if not any(status) and len({tuple(row[4:7]) for row in rows}) > 1:
        raise unlike_losses([(bool(row[4]), int(row[5]), int(row[6])) for row in rows])
    sent = len(mine.means[: 2 * MEANS])
    summed = [_sum([row[i] for row in rows]) for i in (1, 2, 3, *range(HEAD, HEAD + rules + sent))]
    sumsq, total, count, *more = summed
    loss = total / count if count else math.nan
    scale, elements = divided / parts, 0.0
    if any([row[4] for row in rows]):
        scale, elements = divided * copies / count if count else math.nan, count / copies
    by_rule = tuple([root(square) for square in more[:rules]])
    means = () if any(status) else _means(comm, more[rules:], mine.means[2 * MEANS :])
    stop = any([row[7] for row in rows])
    return Verdict(status, loss, scale * root(sumsq), scale, stop, elements, by_rule, means, _beyond(rows, width))


def _beyond(rows: Sequence[Sequence[float]], width: int) -> list[Sequence[float]]:
    """What follows the numbers that are summed, by rank."""
    return [row[width:] for row in rows]


def exchange_sums(comm: Communicator, status: int, values: Sequence[float], width: int, more: int = 0) -> Verdict:
    """Exchange how each rank's part of a step went, and numbers, which are summed in rank order.

    Args:
        comm: the control communicator over the whole mesh.
        status: how this rank's part went.
        values: its numbers; none if it failed.
        width: how many there are, equal on all ranks.
        more: how many of them, the last ones, are not summed, but told by rank.

    Returns:
        The verdict, whose ``rules`` are the sums. It has no loss and no norm of its own.
    """
    rows = _exchanged(comm, [status, *values], 1 + width)
    end = len(rows[0]) - more  # one rank alone sends none that are missing
    sums = tuple([_sum([row[i] for row in rows]) for i in range(1, end)])
    told = [row[end:] for row in rows] if more else ()
    return Verdict(tuple([int(row[0]) for row in rows]), math.nan, math.nan, 1.0, rules=sums, told=told)


def _sum(values: Sequence[float]) -> float:
    """An exact sum. Where infinities or too large numbers have none, it is that of floating-point arithmetic."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def root(square: float) -> float:
    """A norm of its square; nan if that is none."""
    return math.sqrt(square) if square >= 0 else math.nan


def joint_norm(squares: Sequence[float]) -> float:
    """The norm of several vectors together, of the squares of their norms; nan if one of them is not finite."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _exchanged(comm: Communicator, row: Sequence[float], width: int) -> list[list[float]]:
    """The rows of all ranks, which are as long on all of them."""
    if comm.size == 1:
        return [[*row]]
    padded = [*row, *[0.0] * (width - len(row))]
    rows: list[list[float]] = exchange(comm, torch.tensor(padded, dtype=torch.float64, device="cpu")).tolist()
    return rows


def _means(comm: Communicator, summed: Sequence[float], rest: Sequence[float]) -> tuple[float, ...]:
    """Means, of totals and counts that are summed over ranks, and of a rest that is not yet."""
    if rest:
        rows = _exchanged(comm, rest, len(rest))
        summed = [*summed, *[_sum(column) for column in zip(*rows, strict=True)]]
    pairs = zip(summed[::2], summed[1::2], strict=True)
    return tuple([total / count if count else total * math.inf for total, count in pairs])


def widened(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The widest of these dtypes and float32: that of a number which they make together."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


CPU = torch.device("cpu")


def scalar(value: float, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A number that all ranks know as a tensor. What is too large for its dtype is infinite.

    >>> scalar(1e300, torch.float64), scalar(1e300, torch.float32)
    (tensor(1.0000e+300, dtype=torch.float64), tensor(inf))
    """
    try:
        return torch.scalar_tensor(value, dtype=dtype, device=device)
    except RuntimeError:  # it is too large
        return torch.scalar_tensor(value, dtype=torch.float64, device=device).to(dtype)
