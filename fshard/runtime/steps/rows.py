"""Whether a global batch is cut evenly over the ranks: a plain mean over unequal parts would be wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.errors import BatchError, lines
from fshard.runtime.comm import digest
from fshard.runtime.engine import leading_dims
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P, axes_of

NUMBERS = 5
"""How many numbers a rank tells of its batch."""


@dataclass(frozen=True)
class Rows:
    """What ranks tell each other of the sizes of their batches, and which of these must be equal.

    Samples lie along dim 0, where every rank has as many as any other. Further dims that the plan cuts, such as that of
    a sequence, are parts of the same samples, and equal on the ranks that share them; others have other lengths.

    Attributes:
        further: the dims after the first that data axes cut.
        shared: by rank, a number for the samples that it has a part of.
    """

    further: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()

    def numbers(self, batch: Any) -> list[int]:
        """What a rank tells of its batch."""
        firsts = leading_dims(batch)
        if not self.further:  # on the path of every step
            return [digest(firsts), len(firsts), _first(firsts), 0, 0]
        sizes = [
            x.shape[dim] for x in tree.leaves(batch) if isinstance(x, Tensor) for dim in self.further if dim < x.ndim
        ]
        return [digest(firsts), len(firsts), _first(firsts), digest(sizes), _first(sizes)]

    def uneven(self, told: Sequence[Sequence[int]]) -> list[str]:
        """How the batches are unequal, a line a rank; nothing if they are not.

        Args:
            told: the ``numbers`` of each rank.
        """
        if any(row[0] != told[0][0] for row in told):
            counts, firsts = [row[1] for row in told], [row[2] for row in told]
            if len(set(counts)) > 1:
                return [f"rank {rank}: {count} tensor{'s' * (count != 1)}" for rank, count in enumerate(counts)]
            if len(set(firsts)) == 1:
                return [f"the batch's first tensor has {firsts[0]} rows on every rank, but others differ"]
            return [f"rank {rank}: {_count(first)} rows" for rank, first in enumerate(firsts)]
        if not self.further:
            return []
        met: dict[int, int] = {}
        if all(met.setdefault(share, row[3]) == row[3] for share, row in zip(self.shared, told, strict=True)):
            return []
        dim = self.further[0]
        return [f"rank {rank}: {_count(row[4])} along dim {dim}, which is cut, too" for rank, row in enumerate(told)]


def rows_of(spec: P, mesh: Mesh) -> Rows:
    """What must be equal of batches that are cut by a spec.

    >>> import fshard as fs
    >>> rows_of(P("data", "cp"), fs.abstract_mesh((2, 2), ("data", "cp")))
    Rows(further=(1,), shared=(0, 0, 1, 1))
    """
    further = tuple([dim for dim, entry in enumerate(spec.dims) if dim and mesh.axis_size(axes_of(entry)) > 1])
    if not further:
        return Rows()
    own = axes_of(spec.dims[0])
    return Rows(further, tuple([mesh.index(own, rank) for rank in range(mesh.size)]))


def uneven_rows(rows: Sequence[str]) -> BatchError:
    """The error of a mean loss over batches of different sizes, by what ``Rows.uneven`` found."""
    return BatchError(
        lines(
            "the sizes of the batch differ between ranks, and a plain mean over them would be wrong:",
            rows,
            "Give every rank as many rows, or return fs.Mean(losses.sum(), count) from the loss function.",
        )
    )


def _first(sizes: Sequence[int]) -> int:
    return sizes[0] if sizes else -1


def _count(size: int) -> str:
    return "no" if size < 0 else str(size)
