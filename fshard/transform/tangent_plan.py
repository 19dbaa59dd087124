"""Plans of parameters with their tangents: beside each leaf that is trained lies its part of a direction."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.sharding.float8_leaves import refuse_float8
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.plan import Plan
from fshard.sharding.wire import Wire

MARK = "'"
"""Follows the names of tangents: ``blocks.0'`` is the tangent of the group ``blocks.0``."""

SHOWN = 3
"""Tangents of a leaf that are told apart by as many marks; of more, the name has the number."""


def with_tangents(plan: Plan, count: int = 1, trained: bool = False) -> Plan | None:
    """The plan with groups for the tangents of each trained one, behind all others.

    Units read a group and its tangents together. Nothing is rounded in transfers, and no optimizer has a part of a
    leaf.

    Args:
        plan: the plan.
        count: the number of tangents.
        trained: whether tangents have gradients, too.

    Returns:
        The plan; None where leaves lie in host memory, or have a name that a tangent would have.

    Raises:
        TransformError: the plan multiplies in float8.
    """
    refuse_float8(plan.leaves)
    names = {*plan.leaves, *(group.name for group in plan.groups)}
    if any(name.endswith(MARK) for name in names) or any(group.kinds.hosted for group in plan.groups):
        return None
    groups = [_exact(group) for group in plan.groups]
    moving = [group for group in groups if group.trainable]
    for number in range(count):
        groups += [_tangent(group, len(groups) + at, number, trained) for at, group in enumerate(moving)]
    leaves = {leaf.path: leaf for group in groups for leaf in group.leaves}
    return replace(plan, leaves=leaves, groups=tuple(groups), inits={}, source=None)


def frozen(plan: Plan, trained: Collection[str] = ()) -> Plan:
    """The plan with no group that is trained but those of some leaves: a backward of it reduces nothing else."""
    groups = [
        group
        if any(leaf.path in trained for leaf in group.leaves)
        else replace(group, leaves=tuple([replace(leaf, trainable=False) for leaf in group.leaves]))
        for group in plan.groups
    ]
    return replace(plan, leaves={leaf.path: leaf for group in groups for leaf in group.leaves}, groups=tuple(groups))


def tangent_of(path: str, number: int = 0) -> str:
    """The path of a leaf's tangent."""
    return f"{path}{MARK * (number + 1)}" if number < SHOWN else f"{path}{number}{MARK}"


def pairs(plan: Plan, params: Mapping[str, Any], count: int = 1) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Each leaf of a plan, and its tangents if it is trained, from a tree of the plan with tangents."""
    flat = dict(tree.paths(params))
    return {
        path: (flat[path], [flat[tangent_of(path, n)] for n in range(count * leaf.trainable)])
        for path, leaf in plan.leaves.items()
    }


def _exact(group: Group) -> Group:
    leaves = tuple([_plain(leaf) for leaf in group.leaves])
    return replace(group, leaves=leaves, opt_axes=(), opt_parts=1)


def _plain(leaf: Leaf) -> Leaf:
    """A leaf whose transfers round nothing but what a unit reads in another dtype."""
    read = leaf.read_in(replace(leaf.precision, reduce=None))
    return replace(read, wire=Wire(), packed=None, opt=None)


def _tangent(group: Group, id_: int, number: int, trained: bool) -> Group:
    leaves = [replace(leaf, path=tangent_of(leaf.path, number), trainable=trained, aliases=()) for leaf in group.leaves]
    return replace(group, id=id_, name=tangent_of(group.name, number), leaves=tuple(leaves))
