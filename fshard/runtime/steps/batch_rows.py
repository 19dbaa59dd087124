"""Rows of batches: a global batch is cut evenly over the ranks, and copies of a part are equal; else means err."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.errors import BatchError, lines
from fshard.runtime.comm import digest
from fshard.runtime.comm.copies import bits
from fshard.runtime.engine import leading_dims
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.sharding.spec import P, axes_of

NUMBERS = 5
"""How many numbers a rank tells of the sizes of its batch. One of its values may follow."""


@dataclass(frozen=True)
class BatchRows:
    """Facts that ranks tell each other of the sizes of their batches, and which of these must be equal.

    Samples lie along dim 0, where every rank has as many as any other. Further dims that the plan cuts, such as that of
    a sequence, are parts of the same samples, and equal on the ranks that share them; others have other lengths.

    Attributes:
        further: the dims after the first that data axes cut.
        shared: by rank, a number for the samples that it has a part of.
        idle: the axes along which ranks do all alike: no spec names them.
        alike: by rank, a number for the ranks that must have the same batch; empty where that is not compared.
        spec: that of the batch, for errors.
        staged: the axis of the stages of a pipeline; empty without.
    """

    further: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    idle: Axes = ()
    alike: tuple[int, ...] = ()
    spec: P = P()  # noqa: RUF009 - a frozen value
    staged: str = field(default="", repr=False)

    def of(self, trains: bool, axes: Sequence[Axes]) -> "BatchRows":
        """The same for one program: a copy of a batch may differ where nothing trains, or ranks exchange values.

        Args:
            trains: whether parameters are updated by what the program makes of the batch.
            axes: those over which the program communicates itself.
        """
        free = not trains or any(axis in self.idle for some in axes for axis in some)
        return replace(self, alike=()) if self.alike and free else self

    def numbers(self, batch: Any) -> list[int]:
        """Return what a rank tells of its batch."""
        firsts, content = leading_dims(batch), [_content(batch)] if self.alike else []
        if not firsts:  # the values may be rows, such as the texts of a list
            values = len(tree.leaves(batch))
            return [digest((values,)), 0, values, 0, 0, *content]
        if not self.further:  # on the path of every step
            return [digest(firsts), len(firsts), firsts[0], 0, 0, *content]
        sizes = [
            x.shape[dim] for x in tree.leaves(batch) if isinstance(x, Tensor) for dim in self.further if dim < x.ndim
        ]
        return [digest(firsts), len(firsts), firsts[0], digest(sizes), sizes[0] if sizes else -1, *content]

    def unlike(self, told: Sequence[Sequence[int]]) -> BatchError | None:
        """The error of ranks that have different rows where they must have the same; None if they have.

        Args:
            told: the ``numbers`` of each rank.
        """
        first: dict[int, int] = {}
        pairs = zip(self.alike, told, strict=False)
        if all(first.setdefault(share, row[NUMBERS]) == row[5] for share, row in pairs):
            return None
        rank = next(
            r for r, (share, row) in enumerate(zip(self.alike, told, strict=True)) if row[NUMBERS] != first[share]
        )
        return unlike_rows(self.alike.index(self.alike[rank]), rank, self.idle, self.spec, self.staged)

    def uneven(self, told: Sequence[Sequence[int]]) -> list[str]:
        """Say how the batches are unequal, a line a rank; nothing if they are not.

        Args:
            told: the ``numbers`` of each rank.
        """
        if any(row[0] != told[0][0] for row in told):
            counts, firsts = [row[1] for row in told], [row[2] for row in told]
            if len(set(counts)) > 1:
                return [f"rank {rank}: {count} tensor{'s' * (count != 1)}" for rank, count in enumerate(counts)]
            if len(set(firsts)) == 1:
                return [f"the batch's first tensor has {firsts[0]} rows on every rank, but others differ"]
            what = "rows" if counts[0] else "values"
            return [f"rank {rank}: {first} {what}" for rank, first in enumerate(firsts)]
        if not self.further:
            return []
        met: dict[int, int] = {}
        if all(met.setdefault(share, row[3]) == row[3] for share, row in zip(self.shared, told, strict=True)):
            return []
        dim = self.further[0]
        return [f"rank {rank}: {_count(row[4])} along dim {dim}, which is cut, too" for rank, row in enumerate(told)]


def rows_of(plan: Plan) -> BatchRows:
    """Return what must be equal of the batches of a plan.

    >>> import fshard as fs, torch
    >>> mesh = fs.abstract_mesh((2, 2), ("data", "cp"))
    >>> rows_of(fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", P())], batch=P("data", "cp")))
    BatchRows(further=(1,), shared=(0, 0, 1, 1), idle=(), alike=(), spec=P('data', 'cp'))
    """
    spec, mesh = plan.batch, plan.mesh
    further = tuple([dim for dim, entry in enumerate(spec.dims) if dim and mesh.axis_size(axes_of(entry)) > 1])
    shared: tuple[int, ...] = ()
    if further:
        own = axes_of(spec.dims[0])
        shared = tuple([mesh.index(own, rank) for rank in range(mesh.size)])
    idle = _idle_axes(plan)
    others = tuple([axis for axis in mesh.axis_names if axis not in idle])
    alike = tuple([mesh.index(others, rank) for rank in range(mesh.size)]) if idle else ()
    whole = plan.whole or plan
    return BatchRows(further, shared, idle, alike, spec, whole.stages.axis if whole.stages is not None else "")


def _idle_axes(plan: Plan) -> Axes:
    """The axes of several ranks that no spec names."""
    specs = [spec for leaf in plan.leaves.values() for spec in (leaf.at_rest, leaf.compute, leaf.opt)]
    named = {*plan.data_axes, *(axis for spec in specs if spec is not None for axis in spec.axes)}
    return tuple([axis for axis, size in plan.mesh.shape.items() if size > 1 and axis not in named])


def _content(batch: Any) -> int:
    """A number for the values of a batch's tensors."""
    return digest([bits(x) for x in tree.leaves(batch) if isinstance(x, Tensor)])


def unlike_rows(one: int, other: int, idle: Axes, spec: P, staged: str = "") -> BatchError:
    """The error of ranks that are given different rows, and update by gradients that nothing sums between them."""
    if idle == (staged,):
        return BatchError(
            f"ranks {one} and {other} have different rows, but hold stages of one pipeline, which lie along {staged}, "
            f"and the stages of a microbatch compute on the same rows: give these ranks the same rows, as "
            f"plan.local_batch does. Nothing was updated, and the state can be used."
        )
    axes = (*idle, *(axes_of(spec.dims[0]) if spec.dims else ()))
    remedy = P(axes if len(axes) > 1 else axes[0], *spec.dims[1:])
    return BatchError(
        f"ranks {one} and {other} have different rows, but differ only along {'+'.join(idle)}, which neither "
        f"batch={spec!r} nor the spec of a leaf names: nothing would sum their gradients, and their copies of the "
        f"parameters would drift apart. Give make_plan batch={remedy!r}, which cuts the batch along that axis, too, or "
        f"give these ranks the same rows. Nothing was updated, and the state can be used."
    )


def uneven_rows(rows: Sequence[str], floats: Sequence[str] = ()) -> BatchError:
    """The error of a mean over batches of different sizes, by what ``BatchRows.uneven`` found.

    Args:
        rows: the sizes of each rank.
        floats: the names of plain floats that it is of; none of the loss itself.
    """
    of, remedy = "", "fs.Mean(losses.sum(), count) from the loss function"
    if floats:
        of, remedy = f" of {', '.join(floats)}", "fs.Mean(total, count) in the place of each float"
    return BatchError(
        lines(
            f"the sizes of the batch differ between ranks, and a plain mean{of} over them would be wrong:",
            rows,
            f"Give every rank as many rows, or return {remedy}.",
        )
    )


def _count(size: int) -> str:
    return "no" if size < 0 else str(size)
