"""Copies of leaves where a program's own values enter an update: a number for their bits travels with all others.

Gradients that come out of a reduction are equal on all ranks that hold copies of a leaf. What code computes of them
need not be: noise that each rank draws for itself makes copies drift apart.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.errors import ReplicationError, lines
from fshard.runtime.comm import Communicator
from fshard.runtime.comm.exchange import exchange_bytes
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.state.flat import Flat

MASK = (1 << 51) - 1
"""The bits of a sum that travel: those that a float64 holds."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes of bits, by bytes."""

SHOWN = 3
"""Leaves of a group that an error names."""


class CopyMark(NamedTuple):
    """Facts of a rank's copy.

    Attributes:
        what: it holds, in words.
        axes: the data axes over which ranks hold copies.
        number: a sum of its bits, 0-dim, on its device.
    """

    what: str
    group: Group
    axes: Axes
    number: Tensor


class Marks(list[CopyMark]):
    """The marks of a step, in the order of its code."""

    def note(self, what: str, flat: Flat) -> None:
        """Note the copies among some leaves.

        Args:
            what: they are.
            flat: the leaves.
        """
        for group in flat.form.groups:
            axes = copied_over(group, flat.form.plan.mesh)
            if axes and group.trainable:
                self.append(CopyMark(what, group, axes, _sum(flat.held[group.id])))

    def values(self, over: Sequence[Axes]) -> list[Tensor | float]:
        """A number for each set of axes over which ranks hold copies."""
        found: dict[Axes, Tensor] = {}
        for mark in self:
            found[mark.axes] = mark.number + 31 * found[mark.axes] if mark.axes in found else mark.number
        return [found[axes] & MASK if axes in found else 0.0 for axes in over]

    def check(self, comm: Communicator, mesh: Mesh, over: Sequence[Axes], told: Sequence[Sequence[float]]) -> None:
        """Refuse copies that differ.

        Args:
            comm: the control communicator over the whole mesh.
            over: the sets of axes.
            told: the ``values`` of each rank.

        Raises:
            ReplicationError: on all ranks alike.
        """
        if any(_apart(mesh, axes, [row[at] for row in told]) for at, axes in enumerate(over)):
            raise self._differences(comm, mesh)

    def _differences(self, comm: Communicator, mesh: Mesh) -> ReplicationError:
        """The error of copies that differ. Collective."""
        mine = [int(mark.number) for mark in self]
        rows = [json.loads(row) for row in exchange_bytes(comm, json.dumps(mine).encode())]
        found = []
        for at, (what, group, axes, _) in enumerate(self):
            ranks = _apart(mesh, axes, [row[at] for row in rows])
            if ranks:
                paths = [leaf.path for leaf in group.leaves]
                named = ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
                found.append(f"{what} of {named}: ranks {ranks[0]} and {ranks[1]} hold copies, which differ")
        return ReplicationError(
            lines(
                "copies of leaves would drift apart, since they differ between ranks where code of this program made "
                "what enters an update:",
                list(dict.fromkeys(found)),
                "Draw noise by fs.tree.normal(key, plan), which is equal for copies and new for each element; torch's "
                "own draws differ between the ranks of a step. What else differs by rank must be summed over them "
                "first. Nothing was updated, and the states can be used.",
            )
        )


def copied_over(group: Group, mesh: Mesh) -> Axes:
    """The data axes over which ranks hold copies of a group."""
    return tuple([axis for axis in group.sum_axes if mesh.shape[axis] > 1])


def axes_of_copies(plans: Sequence[Plan]) -> list[Axes]:
    """The sets of data axes over which ranks hold copies of trained groups: equal on all ranks."""
    found = {copied_over(group, plan.mesh): None for plan in plans for group in plan.groups if group.trainable}
    return [axes for axes in found if axes]


def _sum(chunk: Tensor) -> Tensor:
    """The sum of a chunk's bits, as integers that wrap around."""
    flat = chunk.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.contiguous().view(INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64)


def _apart(mesh: Mesh, axes: Axes, numbers: Sequence[float]) -> tuple[int, int] | None:
    """Two ranks that hold copies over these axes and have different numbers; None if there are none."""
    others = tuple([axis for axis in mesh.axis_names if axis not in axes])
    first: dict[int, int] = {}
    for rank, number in enumerate(numbers):
        one = first.setdefault(mesh.index(others, rank), rank)
        if numbers[one] != number:
            return one, rank
    return None
