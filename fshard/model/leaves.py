"""The order of a tree's leaves: a quick reader of trees, and errors that say how a tree does not fit."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard import errors, tree
from fshard.arguments import expect, kind
from fshard.model import model_refusals
from fshard.model.changed_buffers import Place
from fshard.model.unit import slot_of
from fshard.patterns import bad_regex, meant_by
from fshard.torch_internals import DisableTorchFunctionSubclass


class LeafOrder:
    """The leaves that a tree must have: their ``paths``, in order, and their shapes, if these are to be checked.

    Of the leaves in ``cuts`` a tree may have equal parts along that dim: code around their modules checks which.
    """

    def __init__(
        self,
        what: str,
        paths: Iterable[str],
        shapes: Mapping[str, torch.Size] | None = None,
        cuts: Mapping[str, int] | None = None,
    ) -> None:
        nested = tree.nest({path: path for path in paths})
        self.paths = tuple(path for path, _ in tree.paths(nested))
        self._what = what
        self._shapes = None if shapes is None else [shapes[path] for path in self.paths]
        self._cuts = cuts or {}
        self._nested = nested
        sorted_paths, self._spec = tree.flatten(nested)  # flattening sorts the keys of dicts
        place = {path: i for i, path in enumerate(self.paths)}
        self._sorted = [place[path] for path in sorted_paths]

    def leaves(self, given: Mapping[str, Any]) -> list[Any]:
        """The leaves of a tree in the order of ``paths``, or a ``TreeError`` that says how it does not fit.

        A tensor with a slot may hold a part of a leaf: the whole leaf's shape counts.
        """
        found = self.read(given)
        if found is not None and all([issubclass(kind, Tensor) for kind in set(map(type, found))]):
            # Leaves may be tensors of a class that answers each question in Python.
            with DisableTorchFunctionSubclass():
                if self._shapes is None or [leaf.shape for leaf in found] == self._shapes:
                    return found
        return self._explained(given)

    def read(self, given: Any) -> list[Any] | None:
        """The values at the places of the leaves, unchecked; None if the tree consists of other dicts.

        Every call reads a tree: generated code takes a tenth of the time of flattening.
        """
        try:
            return self._reader(given)
        except KeyError:
            return None

    @functools.cached_property
    def _reader(self) -> Callable[[Any], list[Any] | None]:
        levels: list[dict[str, tuple[str, int]]] = []
        leaves = _read("t", self._nested, levels)
        lines = ["def read(t):", "if type(t) is not dict: return None", "size = len(t)"]
        for level in levels:  # what is no dict must not be asked for a key
            values = ", ".join([value for value, _ in level.values()])
            lines += [f"{', '.join(level)}, = dicts = {values},", "if set(map(type, dicts)) != kinds: return None"]
            lines += ["size += sum(map(len, dicts))"]
        size = len(self._nested) + sum([size for level in levels for _, size in level.values()])
        space: dict[str, Any] = {"kinds": {dict}}
        exec("\n ".join([*lines, f"return [{', '.join(leaves)}] if size == {size} else None"]), space)
        reader: Callable[[Any], list[Any] | None] = space["read"]
        return reader

    def tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The nested dict of these leaves: the inverse of ``leaves``."""
        nested: dict[str, Any] = tree.unflatten(self._spec, [*map(leaves.__getitem__, self._sorted)])
        return nested

    def _explained(self, given: Mapping[str, Any]) -> list[Any]:
        if not isinstance(given, Mapping):
            raise model_refusals.wrong_leaves(
                self._what, [f"{kind(given)} was given, not a nested dict"], _instead(given)
            )
        found = dict(tree.paths(given))
        known = {path: found[path] for path in self.paths if path in found}
        problems = [f"{path}: missing" for path in self.paths if path not in found]
        problems += [f"{path}: unknown" for path in found if path not in self.paths]
        complete = not problems
        problems += [f"{path}: {kind(x)}, not a tensor" for path, x in known.items() if not isinstance(x, Tensor)]
        wrong = list(self._misshapen(known))
        problems += [f"{path}: shape {shape}, expected {want}" for path, shape, want in wrong]
        if problems:
            shards = complete and {len(shape) for _, shape, _ in wrong} == {1}
            raise model_refusals.wrong_leaves(self._what, problems, _SHARDS if shards else "")
        return list(known.values())

    def _misshapen(self, found: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Leaves of another shape: the path, the shape of the whole leaf, and the expected one."""
        for path, want in zip(self.paths, map(tuple, self._shapes or ()), strict=False):
            leaf = found.get(path)
            slot = slot_of(leaf)
            shape = slot.shape if slot is not None else tuple(leaf.shape) if isinstance(leaf, Tensor) else None
            if shape is not None and shape != want and not _part(shape, want, self._cuts.get(path)):
                yield path, shape, want


def _part(shape: tuple[int, ...], want: tuple[int, ...], dim: int | None) -> bool:
    """Tell whether a leaf is one of equal parts along a dim."""
    if dim is None or len(shape) != len(want) or not shape[dim]:
        return False
    return (*shape[:dim], *shape[dim + 1 :]) == (*want[:dim], *want[dim + 1 :]) and want[dim] % shape[dim] == 0


_SHARDS = (
    "These look like shards, this rank's parts of flat-sharded leaves: call fs.unshard(state.params, plan) for whole "
    "tensors, or give the loss function to a step or to fs.func.sharded_loss, which gather them."
)


def _instead(given: Any) -> str:
    """The likely remedy for a caller who gave this as parameters."""
    if isinstance(given, Tensor):
        return "The parameters come first: model.apply(params, *args)."
    if hasattr(given, "params"):
        return "Give the whole tensors of it, model.params or fs.unshard(state.params, plan)."
    return ""


def _read(name: str, node: Mapping[str, Any], levels: list[dict[str, tuple[str, int]]], depth: int = 0) -> list[str]:
    """Expressions for the leaves in a dict called ``name``, in order.

    ``levels`` gets by depth the names of the dicts in it, with expressions for them and their lengths.
    """
    leaves: list[str] = []
    for number, (key, below) in enumerate(node.items()):
        value = f"{name}[{key!r}]"
        if not isinstance(below, dict):
            leaves.append(value)
            continue
        levels += [{}] if depth == len(levels) else []
        levels[depth][f"{name}_{number}"] = value, len(below)
        leaves += _read(f"{name}_{number}", below, levels, depth + 1)
    return leaves


def find_places(module: nn.Module, kind: str) -> dict[str, list[Place]]:
    """By first path, the places of each of a module's ``"_parameters"`` or ``"_buffers"``."""
    first: dict[int, str] = {}
    found: dict[str, dict[tuple[int, str], Place]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        entries = getattr(owner, kind)
        for name, value in entries.items():
            if value is not None:
                path = first.setdefault(id(value), f"{prefix}.{name}" if prefix else name)
                # A module that is reached by two paths has one dict.
                found.setdefault(path, {})[id(entries), name] = entries, name
    return {path: list(places.values()) for path, places in found.items()}


def tied(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by their first path, and the first path of each further path."""
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


def ignored(named: Mapping[str, Tensor], patterns: Iterable[str]) -> dict[str, Tensor]:
    """The parameters that ``ignore=`` takes out of a model's leaves, under all of their paths. None is trainable."""
    expect("fs.split(module)", [("ignore", patterns, Iterable, "a regular expression, or a list of them")])
    found: set[int] = set()
    problems = []
    for pattern in patterns:
        problem = bad_regex(pattern)
        hits = [] if problem else [id(leaf) for path, leaf in named.items() if re.fullmatch(pattern, path)]
        found.update(hits)
        if not hits:
            hint = problem or meant_by(pattern, named) or f"; paths are like {next(iter(named), 'w')!r}"
            problems.append(problem or f"{pattern!r} matches no parameter{hint}")
    out = {path: leaf for path, leaf in named.items() if id(leaf) in found}
    trained = {path: list(leaf.shape) for path, leaf in out.items() if leaf.requires_grad}
    problems += [f"{path}  {shape}: it has requires_grad=True" for path, shape in trained.items()]
    if problems:
        remedy = (
            "An ignored parameter is not a leaf and gets no gradient: call requires_grad_(False), or leave it in the "
            "tree. To train a tensor on each rank by itself, stack those of all ranks: fs.Rule(path, P(axis), "
            "compute=P(axis))."
        )
        raise errors.PlanError(errors.lines("ignore= of fs.split:", problems, remedy))
    return out
