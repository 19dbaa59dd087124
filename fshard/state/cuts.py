"""The elements of a leaf that each rank has, as a value: leaves that are cut alike have equal ones on every mesh."""

from dataclasses import dataclass, field
from typing import Any

from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class LeafCut:
    """The cut of a leaf into the parts of all ranks.

    Attributes:
        path: of the leaf.
        form: what its parts depend on. Leaves with equal forms have the same elements on a rank, on a mesh of any size.
    """

    path: str = field(compare=False)
    form: tuple[Any, ...]


def cut_of(plan: Plan, path: str) -> LeafCut | None:
    """The cut of a leaf of a plan; None for a leaf that every rank has as a whole."""
    group, number = plan.places()[path]
    return group_cut(group, number)


def group_cut(group: Group, number: int) -> LeafCut | None:
    """The cut of a leaf of a group, by its number there; None for a leaf that every rank has as a whole."""
    leaf = group.leaves[number]
    if not group.gather_axes and not leaf.compute.axes:
        return None
    form: tuple[Any, ...] = (group.kind, leaf.shape, leaf.at_rest, leaf.compute, group.gather_axes)
    if group.kind == "flat" and group.gather_axes:
        form = (*form, leaf.align, number, group.starts, group.leaves[-1].shape)
    return LeafCut(leaf.path, form)
