"""Plain values among what a step function returns: floats become their mean over ranks, all others must be equal.

The numbers of a step, such as losses, are equal on all ranks already; trees of shards are each rank's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.model.changed_buffers import mark_own
from fshard.parts.step_values import Later, number_of
from fshard.runtime.comm import Communicator
from fshard.runtime.engine.loss_result import Mean, means_of
from fshard.runtime.engine.plain_values import FLOAT, PlainTold, PlainValues, is_float, mean_of, plain_values
from fshard.runtime.steps import scalar, widened
from fshard.runtime.steps.batch_rows import uneven_rows
from fshard.runtime.steps.consensus import (
    OK,
    Columns,
    JointRow,
    check_counts,
    check_equal,
    columns_of,
    exchange_row,
    quotient,
    unequal,
)
from fshard.runtime.steps.readings import answers, plain
from fshard.state.flat import Flat, mark_of
from fshard.training.metrics import combine_aux, like_float

FLOATS = 16
"""Floats that travel in the row that ends a step. More take an exchange of their own."""


def returned_values(metrics: Any) -> PlainValues:
    """The plain values of what a step function returned beside its states."""
    return plain_values([tree.mapped(_opened, metrics)], "metrics")


class _Known:
    """Stands for a number of the step."""


class _Parts(NamedTuple):
    """An ``fs.Mean`` as two floats, whose means over ranks have the quotient of their sums."""

    mean_total: Tensor | float
    mean_count: Tensor | float


def _opened(leaf: Any) -> Any:
    if isinstance(leaf, Mean):
        parts = [x.double() if isinstance(x, Tensor) else float(x) for x in (leaf.total, leaf.count)]
        return _Parts(*parts)
    return leaf if number_of(leaf) is None else _Known()


def plain_columns(mine: PlainTold) -> Columns:
    """The columns of plain values in the row that ends a step: a hash of all that must be equal, and the floats."""
    return {"plain": ([mine.number], 1), "floats": (mine.floats[:FLOATS], FLOATS)}


def joint_floats(control: Communicator, row: JointRow, mine: PlainTold, uneven: Sequence[str] = ()) -> list[float]:
    """The mean over ranks of each float.

    Args:
        control: the control communicator over the whole mesh.
        row: that of all ranks, with ``plain_columns``.
        mine: the values of this rank.
        uneven: how the sizes of batches differ between ranks, if they do.

    Raises:
        LossError: plain values that must be equal differ, or a count is negative; on all ranks alike.
        BatchError: floats differ, over batches of different sizes.
    """
    check_equal(control, [number for (number,) in row.told("plain")], mine)
    columns = columns_of(control, row.told("floats"), mine.floats)
    names = [name for name, text in mine.texts.items() if text == FLOAT]
    check_counts([column for name, column in zip(names, columns, strict=True) if name.endswith(".mean_count")])
    unlike = [name for name in unequal(columns, mine) if not name.endswith((".mean_total", ".mean_count"))]
    if unlike and uneven:
        raise uneven_rows(uneven, unlike)
    return [*map(mean_of, columns)]


def with_floats(metrics: Any, floats: Sequence[float]) -> Any:
    """The values that a step function returned, with the mean over ranks of each float and ``fs.Mean``."""
    if not floats:
        return metrics
    found = iter(floats)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Mean):
            total, count = next(found), next(found)
            return scalar(quotient(total, count), widened([leaf.total.dtype]))
        return like_float(leaf, next(found)) if is_float(leaf) and number_of(leaf) is None else leaf

    return tree.mapped(one, metrics)


def exchanged(control: Communicator, metrics: Any) -> Any:
    """The metrics of a step function whose parts ran one by one, by an exchange of their own. Collective.

    Raises:
        LossError: plain values that must be equal differ; on all ranks alike.
    """
    mark_own([leaf for leaf in tree.leaves(metrics) if mark_of(leaf) is not None])
    (mine,) = answers([plain(returned_values(metrics))])
    row = exchange_row(control, OK, plain_columns(mine))
    return with_floats(metrics, joint_floats(control, row, mine))


def marked(parts: Sequence[Any]) -> Any:
    """The auxiliary values of all microbatches as one, with ``fs.Mean`` where they are means over ranks."""
    if not parts or not tree.leaves(parts[0]):
        return parts[0] if parts else {}
    marks = [leaf if isinstance(leaf, Mean) else None for leaf in tree.leaves(parts[0])]
    whole = combine_aux(parts, [0.0] * len(means_of(parts[0])))
    leaves, spec = tree.flatten(whole)
    return tree.unflatten(spec, [leaf if mark is None else mark for leaf, mark in zip(leaves, marks, strict=True)])


def lasting(metrics: Any) -> Any:
    """The values that a step returns beside its states: numbers known at its end, copies of shards, trees as trees."""
    shards = [leaf for leaf in tree.leaves(metrics) if isinstance(leaf, Later) and number_of(leaf) is None]
    copies: dict[int, Tensor] = {}
    for flat in dict.fromkeys(map(mark_of, shards)):
        if flat is not None and {*map(id, flat.leaves)} <= {*map(id, shards)}:
            copied = Flat(flat.form, {group: chunk.clone() for group, chunk in flat.chunks.items()})
            copies |= zip(map(id, flat.leaves), copied.leaves, strict=True)
    copies |= {id(leaf): leaf.current().clone() for leaf in shards if id(leaf) not in copies}
    mark_own(copies.values())
    return tree.mapped(lambda leaf: copies.get(id(leaf), leaf), metrics)
