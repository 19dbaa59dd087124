"""The order of a tree's leaves, how to read them from a tree quickly, and what to say when they do not fit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard import errors, tree
from fshard.model.buffers import Place
from fshard.model.unit import slot_of

_Node = tuple[tuple[str, Any], ...]  # (key, the number of the leaf or the node below)


class LeafOrder:
    """The leaves that a tree must have.

    Args:
        what: what the leaves are, for errors.
        paths: their paths.
        shapes: by path, the shapes to check; without them only the structure is checked.

    Attributes:
        paths: the paths, in the order in which ``leaves`` gives them.
    """

    def __init__(self, what: str, paths: Iterable[str], shapes: Mapping[str, torch.Size] | None = None) -> None:
        nested = tree.nest(dict.fromkeys(paths))
        self.paths = tuple(path for path, _ in tree.paths(nested))
        self._what = what
        self._shapes = None if shapes is None else [shapes[path] for path in self.paths]
        self._root = _compile(nested, iter(range(len(self.paths))))

    def leaves(self, given: Mapping[str, Any]) -> list[Any]:
        """The leaves of a tree in the order of ``paths``.

        Raises:
            TreeError: leaves are missing, unknown, no tensors or misshapen. A tensor with a slot may have any shape:
                its engine knows why.
        """
        found: list[Any] = []
        try:
            _walk(self._root, given, found)
            if self._shapes is None or [leaf.shape for leaf in found] == self._shapes:
                return found
        except (KeyError, IndexError, TypeError, AttributeError):
            pass  # what is wrong is said below
        return self._explained(given)

    def tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The nested dict of these leaves: the inverse of ``leaves``."""
        return _build(self._root, leaves)

    def _explained(self, given: Mapping[str, Any]) -> list[Any]:
        if not isinstance(given, Mapping):
            raise errors.wrong_leaves(self._what, [f"a {type(given).__name__} was given, not a nested dict"])
        found = dict(tree.paths(given))
        known = set(self.paths)
        problems = [f"{path}: missing" for path in self.paths if path not in found]
        problems += [f"{path}: unknown" for path in found if path not in known]
        for i, path in enumerate(self.paths):
            leaf = found.get(path)
            if not isinstance(leaf, Tensor):
                if path in found:
                    problems.append(f"{path}: a {type(leaf).__name__}, not a tensor")
            elif self._shapes is not None and leaf.shape != self._shapes[i] and slot_of(leaf) is None:
                problems.append(f"{path}: shape {tuple(leaf.shape)}, expected {tuple(self._shapes[i])}")
        if problems:
            raise errors.wrong_leaves(self._what, problems)
        return [found[path] for path in self.paths]


def find_places(module: nn.Module, kind: str, aliases: Mapping[str, str]) -> dict[str, list[Place]]:
    """By canonical path, the places of a module's leaves.

    Args:
        module: the module.
        kind: ``"_parameters"`` or ``"_buffers"``.
        aliases: the canonical path of each other one.
    """
    found: dict[str, list[Place]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        entries = getattr(owner, kind)
        for name, value in entries.items():
            if value is not None:
                path = f"{prefix}.{name}" if prefix else name
                found.setdefault(aliases.get(path, path), []).append((entries, name))
    return {path: _distinct(places) for path, places in found.items()}


def tied(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by their first path, and the first path of every other one."""
    first: dict[int, str] = {}
    leaves: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path, tensor in named:
        canonical = first.setdefault(id(tensor), path)
        if canonical == path:
            leaves[path] = tensor
        else:
            aliases[path] = canonical
    return leaves, aliases


def _distinct(places: Sequence[Place]) -> list[Place]:
    """A module reached by two paths has one dict, which need not be written twice."""
    return list({(id(entries), name): (entries, name) for entries, name in places}.values())


def _compile(nested: Mapping[str, Any], count: Iterator[int]) -> _Node:
    return tuple(
        (key, next(count)) if below is None else (key, _compile(below, count)) for key, below in nested.items()
    )


def _walk(node: _Node, given: Mapping[str, Any], found: list[Any]) -> None:
    if len(given) != len(node):
        raise KeyError
    for key, below in node:
        if type(below) is int:
            found.append(given[key])
        else:
            _walk(below, given[key], found)


def _build(node: _Node, leaves: Sequence[Any]) -> dict[str, Any]:
    return {key: leaves[below] if type(below) is int else _build(below, leaves) for key, below in node}
