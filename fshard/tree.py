"""Pytrees with paths. The only module that imports optree.

There are two kinds of tree. *Parameter trees* are nested dicts with string keys and tensors at the leaves; a leaf is
named by its dotted path (``blocks.3.attn.qkv.weight``), in the order in which a module registered it. *Other trees* (a
batch, the arguments and results of a unit) are what optree flattens, and, unlike in optree and in JAX, dataclasses and
mutable mappings that hold tensors: the outputs of Hugging Face's models, the batches of their tokenizers.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any

import optree
from torch import Tensor

from fshard.arguments import kind
from fshard.errors import TreeError
from fshard.hints import unknown_name

_LATER = (
    ("fshard.parts.arithmetic", "add scale"),
    ("fshard.transform.random_trees", "normal rademacher"),
    ("fshard.transform.tree_vectors", "norm norms stack vdot"),
)
"""Functions of trees of shards. They need plans, so they lie in higher rooms, and are looked up when asked for."""

__all__ = [
    "flatten",
    "leaves",
    "map",
    "names",
    "nest",
    "paths",
    "spread",
    "unflatten",
    *" ".join(names for _, names in _LATER).split(),
]


def __getattr__(name: str) -> Any:
    """A name of ``_LATER`` (PEP 562)."""
    for module, names in _LATER:
        if name in names.split():
            return getattr(import_module(module), name)
    raise unknown_name("fshard.tree", name)


Tree = Any
"""A pytree. ``Tree`` says that a value may be nested; Python has no better name for it."""
WATCHED = "_fshard_watched"  # the attribute of shards that holds what calls a function which a user maps over them


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The ``(path, leaf)`` pairs of a parameter tree, in insertion order.

    ``leaves``, ``flatten`` and ``map`` go by sorted keys, as optree and JAX do: pair leaves of two trees by ``map``, or
    by the paths of both, never ``paths`` of one with ``leaves`` of the other.

    Args:
        tree: a nested dict with string keys.
        prefix: what the paths begin with.

    Raises:
        TreeError: it is not a nested dict; a key is not a string, is empty, or holds a dot; or a dict inside of it is
            empty, which no path would show.

    >>> dict(fs.tree.paths({"a": {"w": 1, "b": 2}, "c": 3}))
    {'a.w': 1, 'a.b': 2, 'c': 3}
    """
    _expect_dict(tree, "a parameter tree")
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "." in key:
            raise TreeError(
                f"the key {key!r} {'under ' + repr(prefix[:-1]) if prefix else 'at the root'} cannot name a leaf: keys "
                f"are non-empty strings without dots, since a dot separates the levels of a path. A flat dict with "
                f"dotted names, such as a state dict, becomes a tree by fs.tree.nest(flat)"
            )
        if isinstance(value, Mapping) and not value:
            raise TreeError(
                f"{prefix}{key} is an empty dict: a parameter tree is known by the paths of its leaves, so it would be "
                f"lost. Leave it out, and read it as params.get({key!r}, {{}})"
            )
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree whose leaves have these paths: the inverse of ``dict(paths(tree))``.

    Args:
        flat: leaves by dotted path, such as a state dict.

    Raises:
        TreeError: it is not a dict, or a path is not a string or goes on below a leaf.

    >>> fs.tree.nest({"a.w": 1, "a.b": 2, "c": 3})
    {'a': {'w': 1, 'b': 2}, 'c': 3}
    """
    _expect_dict(flat, "fs.tree.nest(flat)")
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        if not isinstance(path, str):
            raise TreeError(f"fs.tree.nest(flat): the path {path!r} is {kind(path)}: paths are strings, such as 'a.w'")
        *parents, last = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise TreeError(f"fs.tree.nest(flat): {path!r} lies below a leaf: {parent!r} is a name of its own")
        if last in node:
            raise TreeError(f"fs.tree.nest(flat): {path!r} is a leaf, and others lie below it: rename one of them")
        node[last] = leaf
    return root


def _expect_dict(given: Any, what: str) -> None:
    if not isinstance(given, Mapping):
        raise TreeError(
            f"{what} must be a dict of names, and this is {kind(given)}: give such as the params of fs.split(module), "
            f"or state.params"
        )


@dataclasses.dataclass(frozen=True)
class Opened:
    """The structure of an object that is a leaf to optree.

    Attributes:
        kind: its class.
        names: of its fields, or its keys.
        spec: the structure of the list of their values.
        shell: an empty copy, the template of new objects.
    """

    kind: type
    names: tuple[Any, ...]
    spec: "Spec"
    shell: Any = dataclasses.field(compare=False, repr=False)

    def filled(self, leaves: Sequence[Any]) -> Any:
        """An object of this structure with these leaves."""
        return _fill(copy.copy(self.shell), self.names, unflatten(self.spec, leaves))


@dataclasses.dataclass(frozen=True)
class Nested:
    """The structure of a pytree with objects that hold tensors and are leaves to optree.

    Attributes:
        outer: the structure as optree sees it.
        inner: for each of its leaves the structure of the object there; None for a real leaf.
    """

    outer: optree.PyTreeSpec
    inner: tuple[Opened | None, ...]


Spec = optree.PyTreeSpec | Nested
"""The structure of a pytree. It is hashable, and equal for equal structures."""


def flatten(tree: Tree) -> tuple[list[Any], Spec]:
    """The leaves of any pytree, including ``None``, and its structure for ``unflatten``.

    Args:
        tree: a pytree: tuples, lists, dicts, dataclasses and mappings that hold tensors.

    >>> leaves, structure = fs.tree.flatten({"x": [1, 2], "y": None})
    >>> leaves, fs.tree.unflatten(structure, [3, 4, 5])
    ([1, 2, None], {'x': [3, 4], 'y': 5})
    """
    if type(tree) is Tensor:
        return [tree], _LEAF
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    if not _suspect(leaves):
        return leaves, spec
    opened = [_open(leaf) for leaf in leaves]
    if not any(opened):
        return leaves, spec
    flat = [x for leaf, found in zip(leaves, opened, strict=True) for x in (found[0] if found else [leaf])]
    return flat, Nested(spec, tuple(found[1] if found else None for found in opened))


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Tree:
    """The pytree of this structure with these leaves.

    Args:
        spec: the structure, as ``flatten`` returned it.
        leaves: as many leaves as it has.

    Raises:
        TreeError: the structure is not what ``flatten`` returned.

    >>> fs.tree.unflatten(fs.tree.flatten({"x": 1, "y": (2, 3)})[1], "abc")
    {'x': 'a', 'y': ('b', 'c')}
    """
    if not isinstance(spec, Nested):
        if not isinstance(spec, optree.PyTreeSpec):
            raise TreeError(f"fs.tree.unflatten(spec, leaves): spec is {kind(spec)}: give what flatten returned")
        return optree.tree_unflatten(spec, leaves)
    rest = iter(leaves)
    outer = [
        found.filled([next(rest) for _ in range(_count(found.spec))]) if found else next(rest) for found in spec.inner
    ]
    return optree.tree_unflatten(spec.outer, outer)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of any pytree, including ``None``; those of a dict by sorted keys, unlike in ``paths``.

    Args:
        tree: a pytree.

    >>> fs.tree.leaves({"y": None, "x": [1, 2]})
    [1, 2, None]
    """
    if type(tree) is Tensor:
        return [tree]
    found = optree.tree_leaves(tree, none_is_leaf=True)
    return flatten(tree)[0] if _suspect(found) else found


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The pytree of ``fn(leaf, *leaves of rest)``; ``None`` counts as a leaf.

    Args:
        fn: a function of a leaf, and of one leaf of each of ``rest``; elementwise on shards, such as ``state.params``.
        tree: a pytree.
        *rest: pytrees of the same structure.

    Raises:
        TreeError: ``fn`` is no function, or what it makes of shards is not elementwise.

    >>> fs.tree.map(lambda x: x + 1, {"a": 1, "b": (2, 3)})
    {'a': 2, 'b': (3, 4)}
    """
    call = functools.partial(mapped, fn, tree, *rest)
    watch = next((found for x in leaves((tree, *rest)) if callable(found := getattr(x, WATCHED, None))), None)
    return call() if watch is None else watch(call)


def mapped(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """As ``map``, for functions that may do more with shards than users' may."""
    if not callable(fn):
        raise TreeError(f"fs.tree.map(fn, tree): fn is {kind(fn)}: give a function of a leaf first, then the tree")
    flat, spec = flatten(tree)
    if not isinstance(spec, Nested):
        return optree.tree_map(fn, tree, *rest, none_is_leaf=True)
    columns = [flat, *(flatten(other)[0] for other in rest)]
    return unflatten(spec, [fn(*row) for row in zip(*columns, strict=True)])


def swap(fn: Callable[[Any], Any], kind: type | tuple[type, ...], tree: Tree) -> Tree:
    """The pytree with ``fn(x)`` in the place of each object of a class, or of some, which counts as a leaf.

    >>> swap(len, str, {"a": "four", "b": [1, "x"]})
    {'a': 4, 'b': [1, 1]}
    """
    if isinstance(tree, kind):
        return fn(tree)
    if type(tree) is Tensor:
        return tree
    leaf = functools.partial(_is, kind)
    return optree.tree_map(lambda x: fn(x) if isinstance(x, kind) else x, tree, is_leaf=leaf, none_is_leaf=True)


def _is(kind: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, kind)


def spread(prefix: Tree, tree: Tree) -> list[Any]:
    """The leaf of the prefix for each leaf of a tree (``jax``'s pytree prefixes).

    Args:
        prefix: a tree that ends where ``tree`` may go on.
        tree: the other tree.

    >>> fs.tree.spread(("a", "b"), (1, {"x": 2, "y": 3}))
    ['a', 'b', 'b']

    Raises:
        TreeError: the prefix has another structure.
    """
    try:
        found = list(optree.broadcast_prefix(prefix, tree, none_is_leaf=True))
    except ValueError as error:
        raise TreeError(f"a tree of this structure is not a prefix of the other: {error}") from error
    return _repeated(found, flatten(tree)[1], lambda one, path: one)


def names(tree: Tree, root: str) -> list[str]:
    """The expression that names each leaf of a tree.

    Args:
        tree: a pytree.
        root: the expression that stands for the whole tree.

    >>> fs.tree.names((1, {"x": 2}), "args")
    ['args[0]', "args[1]['x']"]
    """
    if not isinstance(root, str):
        raise TreeError(f"fs.tree.names(tree, root): root is {kind(root)}: give a name, such as 'batch'")
    found = [accessor.codify(root) for accessor in optree.tree_accessors(tree, none_is_leaf=True)]
    return _repeated(found, flatten(tree)[1], lambda one, path: one + path)


def register(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Make the objects of a class pytrees.

    Args:
        kind: the class.
        flatten: gives an object's children, its structure, which is hashable, and the names of the attributes.
        unflatten: makes an object of a structure and children, whatever these are.
    """
    optree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        path_entry_type=optree.GetAttrEntry,
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )


_LEAF = optree.treespec_leaf(none_is_leaf=True)
_PLAIN = frozenset((Tensor, int, float, bool, str, bytes, type(None)))


def _suspect(leaves: Sequence[Any]) -> bool:
    """Tell whether one of these is an object that may hold tensors, by types alone: every call runs this."""
    return any([_holder(kind) for kind in {type(leaf) for leaf in leaves} - _PLAIN])


def _holder(kind: type) -> bool:
    if getattr(kind, "__tree_leaf__", False):  # a class of this library whose objects stay whole
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, MutableMapping)


def _open(leaf: Any) -> tuple[list[Any], Opened] | None:
    """The leaves and the structure of an object that holds tensors."""
    if not _holder(type(leaf)):
        return None
    if isinstance(leaf, MutableMapping):
        names = tuple(leaf)
        values = [leaf[name] for name in names]
    else:
        names = tuple(field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name))
        values = [getattr(leaf, name) for name in names]
    flat, spec = flatten(values)
    if not any(isinstance(x, Tensor) for x in flat):
        return None
    shell = _fill(copy.copy(leaf), names, [None] * len(names))
    return flat, Opened(type(leaf), names, spec, shell)


def _fill(made: Any, names: Sequence[Any], values: Sequence[Any]) -> Any:
    for name, value in zip(names, values, strict=True):
        if isinstance(made, MutableMapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # it is a new object, so even a frozen one is written
    return made


def _count(spec: Spec) -> int:
    if not isinstance(spec, Nested):
        return int(spec.num_leaves)
    return sum(_count(found.spec) if found else 1 for found in spec.inner)


def _repeated(outer: Sequence[Any], spec: Spec, combine: Callable[[Any, str], Any]) -> list[Any]:
    """For each leaf the value of its object, combined with its path in the object."""
    if not isinstance(spec, Nested):
        return list(outer)
    rows = zip(outer, spec.inner, strict=True)
    return [combine(one, path) for one, found in rows for path in (_paths(found) if found else [""])]


def _paths(found: Opened) -> list[str]:
    mapping = issubclass(found.kind, MutableMapping)
    heads = [f"[{name!r}]" if mapping else f".{name}" for name in found.names]
    inside = optree.tree_unflatten(_outer(found.spec), [""] * _outer(found.spec).num_leaves)
    below = [accessor.codify("") for accessor in optree.tree_accessors(inside, none_is_leaf=True)]
    # The values are a list, so each path begins with the number of its field: "[0]['x']".
    joined = [heads[int(path[1 : path.index("]")])] + path[path.index("]") + 1 :] for path in below]
    return _repeated(joined, found.spec, lambda one, path: one + path)


def _outer(spec: Spec) -> optree.PyTreeSpec:
    return spec.outer if isinstance(spec, Nested) else spec


def __dir__() -> list[str]:
    return sorted(__all__)
