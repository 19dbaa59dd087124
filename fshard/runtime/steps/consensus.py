"""The end of a step: one read of the device and one exchange tell all ranks the loss, the norm, and who failed."""

import functools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.comm import Communicator, exchange, exchange_bytes
from fshard.runtime.engine.loss_result import Mean, fingerprint, means_of, no_aux
from fshard.runtime.engine.plain_values import FLOAT, PlainTold, PlainValues, alike, mean_of, plain_values
from fshard.runtime.memory.norms import DTYPE
from fshard.runtime.steps.step_refusals import unlike_losses, unlike_values

OK, FAILED, RETRY, CUT, STARVED = 0, 1, 2, 3, 4
"""How a rank's own part of a step went. ``RETRY``: its program left the schedule. ``CUT``: a collective of its program
has failed, most likely because another rank's program is over. ``STARVED``: there was too little memory for a policy
that is only being timed."""

HEAD = 9
"""Numbers of a row that every step sends."""

MEANS = 16
"""Auxiliary means that travel in the row, or twice as many plain floats. More take an exchange of their own."""

RuleNorms = Sequence[tuple[float, Tensor]]
"""Norms of gradients, 0-dim, each after the part of its elements that this rank counts."""


@dataclass(frozen=True)
class Tally:
    """Numbers that one rank brings to the consensus, summed over its microbatches.

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
        plain: the plain values that its function returned.
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
    plain: PlainTold = PlainTold()

    @property
    def mean(self) -> float:
        """This rank's own loss; 0 where it has none."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Verdict:
    """Numbers that all ranks learn. Equal on all of them, bit for bit: rows are added in rank order.

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
        floats: the mean over ranks of each plain float.
        unlike: the names of those that differ between ranks.
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
    floats: tuple[float, ...] = field(default=(), repr=False)
    unlike: tuple[str, ...] = field(default=(), repr=False)

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
    means, named, plain = _named_means(aux)
    values: list[Tensor | float] = [norm for _, norm in norms]
    values += [norm for rule in rules for _, norm in rule]
    values += [part for loss in losses for part in loss]
    values += [part for row in means for mean in row for part in (mean.total, mean.count)]
    numbers = read([*values, *plain.unread])

    def squares(shares: RuleNorms) -> float:
        return _sum([share * norm * norm for (share, _), norm in zip(shares, numbers, strict=False)])

    def sums(parts: int) -> tuple[float, ...]:
        pairs = [(next(numbers), next(numbers)) for _ in range(parts)]
        return tuple(map(sum, zip(*pairs, strict=True))) if pairs else (0.0, 0.0)

    sumsq, by_rule = squares(norms), tuple([squares(rule) for rule in rules])
    total, count = sums(len(losses))
    summed = tuple([number for row in means for number in sums(len(row))])
    return Tally(OK, sumsq, total, count, weighted, named, stop, by_rule, summed, plain.told(numbers))


def _named_means(aux: Sequence[Any]) -> tuple[list[list[Mean]], tuple[int, int], PlainValues]:
    """The means of all microbatches, a row for each; how many they are, with a hash of their names; plain values."""
    if all(map(no_aux, aux)):
        return [], (0, 0), PlainValues({}, {})
    return [list(row) for row in zip(*map(means_of, aux), strict=True)], fingerprint(aux), plain_values(aux)


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
        LossError: losses or auxiliary means differ in kind between ranks, or plain values that must be equal do; on all
            of them alike.
    """
    more = [*mine.means, *mine.plain.floats]
    row = [mine.status, mine.sumsq, mine.total, mine.count, mine.weighted, *mine.named, mine.stop, mine.plain.number]
    row += [*mine.rules, *[0.0] * (rules - len(mine.rules)), *more[: 2 * MEANS]]
    width = HEAD + rules + 2 * MEANS
    rows = _exchanged(comm, [*row, *[0.0] * (width - len(row)), *own], width + len(own))
    status = tuple([int(row[0]) for row in rows])
    if not any(status):
        _check_alike(comm, rows, mine)
    sumsq, total, count, *squares = [_sum([row[i] for row in rows]) for i in (1, 2, 3, *range(HEAD, HEAD + rules))]
    loss = total / count if count else math.nan
    scale, elements = divided / parts, 0.0
    if any([row[4] for row in rows]):
        scale, elements = divided * copies / count if count else math.nan, count / copies
    by_rule = tuple([root(square) for square in squares])
    columns = [] if any(status) else columns_of(comm, rows, HEAD + rules, more, 2 * MEANS)
    means, floats = _means(columns[: len(mine.means)]), columns[len(mine.means) :]
    stop = any([row[7] for row in rows])
    norm, unlike = scale * root(sumsq), unequal(floats, mine.plain)
    joint = tuple(map(mean_of, floats))
    return Verdict(status, loss, norm, scale, stop, elements, by_rule, means, _beyond(rows, width), joint, unlike)


def _beyond(rows: Sequence[Sequence[float]], width: int) -> list[Sequence[float]]:
    """Return what follows the numbers that are summed, by rank."""
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


def _check_alike(comm: Communicator, rows: Sequence[Sequence[float]], mine: Tally) -> None:
    """Refuse results that differ in kind between ranks, or in what must be equal."""
    if len({tuple(row[4:7]) for row in rows}) > 1:
        raise unlike_losses([(bool(row[4]), int(row[5]), int(row[6])) for row in rows])
    check_equal(comm, [row[8] for row in rows], mine.plain)


def check_equal(comm: Communicator, numbers: Sequence[float], mine: PlainTold) -> None:
    """Refuse plain values that differ between ranks and are no floats. Collective if they do.

    Args:
        comm: the control communicator over the whole mesh.
        numbers: ``PlainTold.number`` of each rank.
        mine: the plain values of this one.

    Raises:
        LossError: they do; on all ranks alike.
    """
    if len(set(numbers)) > 1:
        raise unlike_values([json.loads(text) for text in exchange_bytes(comm, json.dumps({**mine.texts}).encode())])


def columns_of(
    comm: Communicator, rows: Sequence[Sequence[float]], first: int, mine: Sequence[float], most: int
) -> list[Sequence[float]]:
    """By number its value on each rank: of those that travelled in the row, and of more. Collective if there are more.

    Args:
        comm: the control communicator over the whole mesh.
        rows: of each rank.
        first: the place in them of the first number.
        mine: the numbers of this rank; as many on all ranks.
        most: how many travel in the row.
    """
    found: list[Sequence[float]] = [[row[first + at] for row in rows] for at in range(min(len(mine), most))]
    if rest := mine[most:]:
        found += zip(*_exchanged(comm, rest, len(rest)), strict=True)
    return found


def unequal(columns: Sequence[Sequence[float]], told: PlainTold) -> tuple[str, ...]:
    """The names of plain floats that differ between ranks."""
    names = [name for name, text in told.texts.items() if text == FLOAT]
    return tuple([name for name, column in zip(names, columns, strict=False) if not alike(column)])


def _means(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Means, of totals and counts by rank."""
    summed = [*map(_sum, columns)]
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
