"""The end of a step: one read of the device and one exchange tell all ranks the loss, the norm, and who failed."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.runtime.comm import Communicator, exchange, exchange_bytes
from fshard.runtime.engine.loss_result import fingerprint, no_aux
from fshard.runtime.engine.plain_values import FLOAT, PlainTold, PlainValues, alike, mean_of, plain_values
from fshard.runtime.steps.readings import Reading, RuleNorms, answers, exact_sum, mean_pairs, pair, plain, squares
from fshard.runtime.steps.step_refusals import negative_counts, unlike_losses, unlike_values

OK, FAILED, RETRY, CUT, STARVED, LACKING = range(6)
"""How a rank's own part of a step went. ``RETRY``: its program left the schedule. ``CUT``: a collective of its program
has failed, most likely because another rank's program is over. ``STARVED``: there was too little memory for a policy
that is only being timed. ``LACKING``: it has found no schedule, and the call can do without one."""

IDLE = -1.0
"""The kind of the loss of a rank that has none."""

MEANS = 16
"""Auxiliary means that travel in the row, or twice as many plain floats. More take an exchange of their own."""


@dataclass(frozen=True)
class Tally:
    """Numbers that one rank brings to the consensus, summed over its microbatches.

    Attributes:
        sumsq: its part of the squared norm of the summed gradients; each element counts once over all ranks.
        total: the sum of its losses.
        count: of their elements.
        weighted: whether the loss is an ``fs.Mean``.
        named: how many auxiliary means it has, and a hash of their names.
        stop: whether it asks all ranks to stop.
        rules: its part of the squared norm of each clipping rule's leaves.
        means: the total and the count of each auxiliary mean, one behind the other.
        plain: the plain values that its function returned.
        idle: whether it has no loss of its own, which is on the ranks of another stage.
    """

    sumsq: float = 0.0
    total: float = 0.0
    count: float = 0.0
    weighted: bool = False
    named: tuple[int, int] = (0, 0)
    stop: bool = False
    rules: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    plain: PlainTold = PlainTold()
    idle: bool = False

    @property
    def more(self) -> list[float]:
        """Its auxiliary means, and the floats among its plain values."""
        return [*self.means, *self.plain.floats]

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


def status_alone(status: tuple[int, ...]) -> Verdict:
    """The verdict of ranks that have told each other only how their parts went."""
    return Verdict(status, math.nan, math.nan, 1.0)


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
    of_means, named, values = list[Reading](), (0, 0), PlainValues({}, {})
    if not all(map(no_aux, aux)):
        of_means, named, values = mean_pairs(aux), fingerprint(aux), plain_values(aux)
    (sumsq,), by_rule, (total, count), *summed, told = answers(
        [squares([norms]), squares(rules), pair(losses), *of_means, plain(values)]
    )
    flat = tuple([number for each in summed for number in each])
    return Tally(sumsq, total, count, weighted, named, stop, tuple(by_rule), flat, told)


def tally_columns(mine: Tally, rules: int = 0, own: Sequence[float] = ()) -> "Columns":
    """A tally as numbers by name.

    Args:
        mine: this rank's.
        rules: for how many clipping rules there are norms.
        own: numbers that are not summed, but told by rank; as many on all ranks.
    """
    return {
        "square": ([mine.sumsq], 1),
        "loss": ([mine.total, mine.count], 2),
        "kind": ([IDLE if mine.idle else mine.weighted, *mine.named], 3),
        "stop": ([mine.stop], 1),
        "plain": ([mine.plain.number], 1),
        "rules": (mine.rules, rules),
        "more": (mine.more[: 2 * MEANS], 2 * MEANS),
        "own": (own, len(own)),
    }


def verdict_of(comm: Communicator, row: "JointRow", mine: Tally, parts: int, copies: int, divided: float) -> Verdict:
    """Return what the tallies of all ranks come to. Collective if they have more numbers than a row has room for.

    Args:
        comm: the control communicator over the whole mesh.
        row: the ``tally_columns`` of all ranks.
        mine: this rank's.
        parts: microbatches of the global batch, over ranks and accumulation.
        copies: how many ranks work on the same part.
        divided: what gradients were divided by: the parts, unless the loss was scaled or a short dtype needs otherwise.

    Raises:
        LossError: losses or auxiliary means differ in kind between ranks, or plain values that must be equal do; on all
            of them alike.
    """
    told, well = row.told("kind"), not any(row.status)
    telling = [rank for rank, kind in enumerate(told) if kind[0] != IDLE]
    kinds = [told[rank] for rank in telling]
    if well:
        if len({*map(tuple, kinds)}) > 1:
            raise unlike_losses([(bool(weighted), int(count), int(named)) for weighted, count, named in kinds])
        check_counts([*zip(*row.told("loss"), strict=True)][1:])
        plain_numbers = row.told("plain")
        check_equal(comm, [plain_numbers[rank][0] for rank in telling], mine.plain)
    total, count = row.summed("loss")
    loss = total / count if count else math.nan
    weighted = any([weighted for weighted, *_ in kinds])
    scale = mean_scale(count if weighted else None, divided, parts, copies)
    more = row.told("more")
    joint = columns_of(comm, [more[rank] for rank in telling], mine.more) if well else []
    check_counts(joint[1 : len(mine.means) : 2])
    means, floats = _means(joint[: len(mine.means)]), joint[len(mine.means) :]
    return Verdict(
        status=row.status,
        loss=loss,
        norm=scale * root(*row.summed("square")),
        scale=scale,
        stop=any([stop for (stop,) in row.told("stop")]),
        count=count / copies if weighted else 0.0,
        rules=tuple(map(root, row.summed("rules"))),
        means=means,
        told=row.told("own"),
        floats=tuple(map(mean_of, floats)),
        unlike=unequal(floats, mine.plain),
    )


Columns = Mapping[str, tuple[Sequence[float], int]]
"""The numbers that a rank brings, by name, and how many of each name all ranks have room for."""


class JointRow(NamedTuple):
    """The rows of all ranks at the end of a step: numbers by name.

    Attributes:
        status: how each rank's part went.
        rows: the numbers of each rank.
        places: where those of a name begin and end.
    """

    status: tuple[int, ...]
    rows: Sequence[Sequence[float]]
    places: Mapping[str, tuple[int, int]]

    def told(self, name: str) -> list[Sequence[float]]:
        """The numbers of a name, by rank."""
        begin, end = self.places[name]
        return [row[begin:end] for row in self.rows]

    def summed(self, name: str) -> list[float]:
        """The sums over ranks of the numbers of a name: exact, and equal on all ranks, bit for bit."""
        return [exact_sum([row[at] for row in self.rows]) for at in range(*self.places[name])]


def exchange_row(comm: Communicator, status: int, columns: Columns) -> JointRow:
    """Exchange how each rank's part of a step went, and its numbers. Collective.

    Args:
        comm: the control communicator over the whole mesh.
        status: how this rank's part went.
        columns: its numbers: fewer than there is room for are filled up with zeros.
    """
    row, places = [float(status)], dict[str, tuple[int, int]]()
    for name, (numbers, width) in columns.items():
        begin = len(row)
        places[name] = begin, begin + width
        row += numbers
        if len(numbers) < width:
            row += [0.0] * (width - len(numbers))
    rows = _exchanged(comm, row)
    return JointRow(tuple([int(each[0]) for each in rows]), rows, places)


def root(square: float) -> float:
    """A norm of its square; nan if that is none."""
    return math.sqrt(square) if square >= 0 else math.nan


def joint_norm(squares: Sequence[float]) -> float:
    """The norm of several vectors together, of the squares of their norms; nan if one of them is not finite."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _exchanged(comm: Communicator, row: Sequence[float]) -> list[list[float]]:
    """The rows of all ranks, which are as long on all of them."""
    if comm.size == 1:
        return [[*row]]
    rows: list[list[float]] = exchange(comm, torch.tensor(row, dtype=torch.float64, device="cpu")).tolist()
    return rows


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


def columns_of(comm: Communicator, told: Sequence[Sequence[float]], mine: Sequence[float]) -> list[Sequence[float]]:
    """By number its value on each rank: of those that travelled in the row, and of more. Collective if there are more.

    Args:
        comm: the control communicator over the whole mesh.
        told: by rank, the numbers of the row, with zeros behind them if there are fewer than it has room for.
        mine: the numbers of this rank; as many on all ranks.
    """
    found: list[Sequence[float]] = [*zip(*told, strict=True)]
    if rest := mine[len(told[0]) :]:
        found += zip(*_exchanged(comm, rest), strict=True)
    return found[: len(mine)]


def unequal(columns: Sequence[Sequence[float]], told: PlainTold) -> tuple[str, ...]:
    """The names of plain floats that differ between ranks."""
    names = [name for name, text in told.texts.items() if text == FLOAT]
    return tuple([name for name, column in zip(names, columns, strict=False) if not alike(column)])


def mean_scale(count: float | None, divided: float, parts: int, copies: int) -> float:
    """Return what sums of gradients are multiplied by to become those of the mean.

    Args:
        count: of the elements of an ``fs.Mean``, over all ranks; None of a plain mean.
        divided: what gradients were divided by before they were summed.
        parts: microbatches of the global batch, over ranks and accumulation.
        copies: how many ranks work on the same part.
    """
    if count is None:
        return divided / parts
    return divided * copies / count if count else math.nan


def check_counts(of_ranks: Sequence[Sequence[float]]) -> None:
    """Refuse counts, given by mean and rank, that are negative."""
    for counts in of_ranks:
        if any([count < 0 for count in counts]):
            raise negative_counts(counts)


def _means(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Means, of totals and counts by rank."""
    summed = [*map(exact_sum, columns)]
    return tuple(map(quotient, summed[::2], summed[1::2]))


def quotient(total: float, count: float) -> float:
    """A mean; that of nothing is infinite, or nan."""
    return total / count if count else total * math.inf


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
