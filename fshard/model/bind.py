"""Binding: a tree of tensors put into the dicts of a module for the time of one call.

``torch.func.functional_call`` does the same through accessors and checks that cost more than a small module. Here
every place is found once, when the model is split; a call walks the tree, stores, runs and restores.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard import errors, tree
from fshard.model.buffers import Place, Tracker
from fshard.model.unit import slot_of

_Node = tuple[tuple[str, Any, Any], ...]  # (key, the node below or None, the place or None)


class Binding:
    """Where the leaves of one tree go.

    Args:
        what: what the leaves are, for errors.
        places: by path, every place that the leaf fills: several when it is tied.
        shapes: by path, the shapes to check; without them only the structure is checked.
    """

    def __init__(
        self,
        what: str,
        places: Mapping[str, Sequence[Place]],
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        nested = tree.nest(places)
        self.paths = tuple(path for path, _ in tree.paths(nested))
        self.places = [places[path] for path in self.paths]
        self.sources = [some[0] for some in self.places]
        self._what = what
        self._root = _compile(nested)
        self._shapes = None if shapes is None else [shapes[path] for path in self.paths]
        self._targets = [(*place, i) for i, some in enumerate(self.places) for place in some]

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

    def current(self) -> dict[str, Any]:
        """The tree of what is bound now."""
        return _gather(self._root)

    def bind(self, leaves: Sequence[Any]) -> list[Any]:
        """Bind leaves, given in the order of ``paths``; returns what ``restore`` needs."""
        saved = [entries[name] for entries, name, _ in self._targets]
        for entries, name, i in self._targets:
            entries[name] = leaves[i]
        return saved

    def restore(self, saved: Sequence[Any]) -> None:
        """Undo the last ``bind``."""
        for (entries, name, _), value in zip(self._targets, saved, strict=True):
            entries[name] = value

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


class Body:
    """A module made a pure function of its parameters and buffers.

    Attributes:
        params: where its parameters go.
        buffers: where its buffers go.
    """

    def __init__(self, module: nn.Module, params: Binding, buffers: Binding) -> None:
        self.module = module
        self.params = params
        self.buffers = buffers
        self._tracker = Tracker(module, buffers.places)

    def run(
        self, params: Sequence[Any], buffers: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Call the module with these leaves bound.

        Returns:
            What the module returns, and the buffers that it changed, by path.
        """
        if not buffers:
            return self._run_plainly(params, args, kwargs), {}
        own = self._tracker.clones(buffers)
        versions = [buffer._version for buffer in own]
        saved = self.buffers.bind(own)
        try:
            with self._tracker.watch() as watch:
                out = self._run_plainly(params, args, kwargs)
            changed = {self.buffers.paths[i]: new for i, new in self._tracker.changed(buffers, own, versions, watch)}
        finally:
            self.buffers.restore(saved)
        return out, changed

    def _run_plainly(self, params: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        saved = self.params.bind(params)
        try:
            return self.module(*args, **kwargs)
        finally:
            self.params.restore(saved)


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


def _compile(nested: Mapping[str, Any]) -> _Node:
    return tuple(
        (key, _compile(below), None) if isinstance(below, Mapping) else (key, None, below[0])
        for key, below in nested.items()
    )


def _walk(node: _Node, given: Mapping[str, Any], found: list[Any]) -> None:
    if len(given) != len(node):
        raise KeyError
    for key, below, _ in node:
        if below is None:
            found.append(given[key])
        else:
            _walk(below, given[key], found)


def _gather(node: _Node) -> dict[str, Any]:
    return {
        key: place[0][place[1]] if below is None else _gather(below)
        for key, below, place in node
    }
