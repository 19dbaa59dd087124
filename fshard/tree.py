"""Pytrees with paths. The only module that imports optree.

Two kinds of tree occur. *Parameter trees* are nested dicts with string keys and tensors at the leaves; a leaf is named
by its dotted path (``blocks.3.attn.qkv.weight``) and keeps the insertion order of its dict, which is the order in which
a module registered it. *Any other tree* (a batch, the arguments and results of a unit) is whatever optree flattens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree

from fshard.errors import TreeError

Tree = Any
"""A pytree. ``Tree`` says that a value may be nested; Python has no better name for it."""


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The ``(path, leaf)`` pairs of a parameter tree, in insertion order.

    Raises:
        TreeError: a key is not a string, is empty, or holds a dot.
    """
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "." in key:
            raise TreeError(
                f"the key {key!r} under {prefix.rstrip('.') or 'the root'!r} cannot name a leaf: keys are "
                f"non-empty strings without dots, since a dot separates the levels of a path"
            )
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree whose leaves have these paths: the inverse of ``dict(paths(tree))``.

    >>> nest({"a.w": 1, "a.b": 2, "c": 3})
    {'a': {'w': 1, 'b': 2}, 'c': 3}
    """
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of any pytree, ``None`` among them, and what ``unflatten`` needs to put them back."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, spec


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Tree:
    """The pytree of this structure with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of any pytree, ``None`` among them."""
    return optree.tree_leaves(tree, none_is_leaf=True)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The pytree of ``fn(leaf, *leaves of rest)``; ``None`` counts as a leaf."""
    return optree.tree_map(fn, tree, *rest, none_is_leaf=True)


def spread(prefix: Tree, tree: Tree) -> list[Any]:
    """For each leaf of a tree the leaf of the prefix that stands for it (``jax``'s pytree prefixes).

    >>> spread(("a", "b"), (1, {"x": 2, "y": 3}))
    ['a', 'b', 'b']

    Raises:
        TreeError: the prefix has another structure.
    """
    try:
        return list(optree.broadcast_prefix(prefix, tree, none_is_leaf=True))
    except ValueError as error:
        raise TreeError(f"a tree of this structure is no prefix of the other: {error}") from error


def names(tree: Tree, root: str) -> list[str]:
    """The expression that names each leaf of a tree.

    >>> names((1, {"x": 2}), "args")
    ['args[0]', "args[1]['x']"]
    """
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, none_is_leaf=True)]
