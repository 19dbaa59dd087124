"""Plans of parameters with their tangents: beside each leaf that is trained lies its part of a direction."""

from collections.abc import Mapping
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


def with_tangents(plan: Plan) -> Plan | None:
    """The plan with a frozen group for the tangent of each trained one, behind all others.

    Units read a group and its tangent together. Nothing is rounded in transfers, and no optimizer has a part of a leaf.

    Returns:
        The plan; None where leaves lie in host memory, or have a name that a tangent would have.

    Raises:
        TransformError: the plan multiplies in float8.
    """
    refuse_float8(plan.leaves)
    names = {*plan.leaves, *(group.name for group in plan.groups)}
    if any(f"{name}{MARK}" in names for name in names) or any(group.kinds.hosted for group in plan.groups):
        return None
    primal = [_exact(group) for group in plan.groups]
    trained = [group for group in primal if group.trainable]
    tangents = [_tangent(group, len(primal) + number) for number, group in enumerate(trained)]
    groups = (*primal, *tangents)
    found = {leaf.path: leaf for group in groups for leaf in group.leaves}
    leaves = {path: found[path] for path in (*plan.leaves, *(x.path for one in tangents for x in one.leaves))}
    return replace(plan, leaves=leaves, groups=groups, inits={}, source=None)


def tangent_of(path: str) -> str:
    """The path of a leaf's tangent."""
    return f"{path}{MARK}"


def pairs(plan: Plan, params: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Each leaf of a plan, and its tangent if it is trained, from a tree of the plan with tangents."""
    flat = dict(tree.paths(params))
    return {
        path: (flat[path], flat[tangent_of(path)] if leaf.trainable else None) for path, leaf in plan.leaves.items()
    }


def _exact(group: Group) -> Group:
    leaves = tuple([_plain(leaf) for leaf in group.leaves])
    return replace(group, leaves=leaves, opt_axes=(), opt_parts=1)


def _plain(leaf: Leaf) -> Leaf:
    """A leaf whose transfers round nothing but what a unit reads in another dtype."""
    read = leaf.read_in(replace(leaf.precision, reduce=None))
    return replace(read, wire=Wire(), packed=None, opt=None)


def _tangent(group: Group, number: int) -> Group:
    leaves = tuple([replace(leaf, path=tangent_of(leaf.path), trainable=False, aliases=()) for leaf in group.leaves])
    return replace(group, id=number, name=tangent_of(group.name), leaves=leaves)
