"""The order of a tree's leaves: a quick reader of trees, and errors that say how a tree does not fit."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard import errors, tree
from fshard.arguments import expect, kind
from fshard.model.buffers import Place
from fshard.model.unit import slot_of
from fshard.patterns import bad_regex


class LeafOrder:
    """The leaves that a tree must have.

    Args:
        what: the name of the tree in errors.
        paths: the paths of the leaves.
        shapes: by path, the shapes to check; without them only the structure is checked.

    Attributes:
        paths: the paths, in the order in which ``leaves`` gives them.
    """

    def __init__(self, what: str, paths: Iterable[str], shapes: Mapping[str, torch.Size] | None = None) -> None:
        nested = tree.nest({path: path for path in paths})
        self.paths = tuple(path for path, _ in tree.paths(nested))
        self._what = what
        self._shapes = None if shapes is None else [shapes[path] for path in self.paths]
        self._nested = nested
        # Flattening sorts the keys of dicts.
        place = {path: i for i, path in enumerate(self.paths)}
        sorted_paths, self._spec = tree.flatten(nested)
        self._sorted = [place[path] for path in sorted_paths]

    def leaves(self, given: Mapping[str, Any]) -> list[Any]:
        """The leaves of a tree in the order of ``paths``.

        Raises:
            TreeError: leaves are missing, unknown, misshapen or no tensors. A tensor with a slot may hold a part of a
                leaf: the whole leaf's shape counts.
        """
        found = self.read(given)
        if found is not None and all([issubclass(kind, Tensor) for kind in set(map(type, found))]):
            if self._shapes is None or _shapes(found) == self._shapes:
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
        lines, leaves = _read("t", self._nested)
        space: dict[str, Any] = {}
        exec("\n ".join(["def read(t):", *lines, f"return [{', '.join(leaves)}]"]), space)
        reader: Callable[[Any], list[Any] | None] = space["read"]
        return reader

    def tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The nested dict of these leaves: the inverse of ``leaves``."""
        flat: dict[str, Any] = tree.unflatten(self._spec, [leaves[i] for i in self._sorted])
        return flat

    def _explained(self, given: Mapping[str, Any]) -> list[Any]:
        if not isinstance(given, Mapping):
            raise errors.wrong_leaves(self._what, [f"{kind(given)} was given, not a nested dict"], _instead(given))
        found = dict(tree.paths(given))
        known = set(self.paths)
        problems = [f"{path}: missing" for path in self.paths if path not in found]
        problems += [f"{path}: unknown" for path in found if path not in known]
        misshapen = self._misshapen(found)
        shards = not problems and all(len(shape) == 1 for shape, _ in misshapen.values())
        problems += [
            f"{p}: {kind(x)}, not a tensor" for p, x in found.items() if p in known and not isinstance(x, Tensor)
        ]
        problems += [f"{path}: shape {shape}, expected {want}" for path, (shape, want) in misshapen.items()]
        remedy = _SHARDS if shards else ""
        if problems:
            raise errors.wrong_leaves(self._what, problems, remedy)
        return [found[path] for path in self.paths]

    def _misshapen(self, found: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """By path, the shapes of leaves that have another than the expected one, and that."""
        wrong = {}
        for path, want in zip(self.paths, map(tuple, self._shapes or ()), strict=False):
            leaf = found.get(path)
            shape = _whole(leaf) if isinstance(leaf, Tensor) else None
            if shape is not None and shape != want:
                wrong[path] = shape, want
        return wrong


_SHARDS = (
    "These look like shards, this rank's parts of flat-sharded leaves: call fs.unshard(state.params, plan) for whole "
    "tensors, or give the loss function to a step or to fs.sharded_loss, which gather them."
)


def _instead(given: Any) -> str:
    """The likely remedy for a caller who gave this as parameters."""
    if isinstance(given, Tensor):
        return "The parameters come first: model.apply(params, *args)."
    if hasattr(given, "params"):
        return "Give the whole tensors of it, model.params or fs.unshard(state.params, plan)."
    return ""


def _read(name: str, node: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Source that reads a dict called ``name`` and the dicts in it, and expressions for the leaves, in order."""
    lines = [f"if type({name}) is not dict or len({name}) != {len(node)}: return None"]
    leaves: list[str] = []
    for number, (key, below) in enumerate(node.items()):
        if not isinstance(below, dict):
            leaves.append(f"{name}[{key!r}]")
            continue
        inner = f"{name}_{number}"
        more, found = _read(inner, below)
        lines += [f"{inner} = {name}[{key!r}]", *more]
        leaves += found
    return lines, leaves


def find_places(module: nn.Module, kind: str, aliases: Mapping[str, str]) -> dict[str, list[Place]]:
    """By canonical path, the places of a module's leaves.

    Args:
        module: the module.
        kind: ``"_parameters"`` or ``"_buffers"``.
        aliases: the canonical path of each further path.
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
    """The parameters that ``ignore=`` takes out of a model's leaves, under all of their paths.

    Raises:
        PlanError: a pattern is malformed or matches no parameter, or a matched parameter is trainable.
    """
    expect("fs.split(module)", [("ignore", patterns, Iterable, "a regular expression, or a list of them")])
    found: set[int] = set()
    problems = []
    for pattern in patterns:
        if problem := bad_regex(pattern):
            problems.append(problem)
            continue
        hits = [id(leaf) for path, leaf in named.items() if re.fullmatch(pattern, path)]
        found.update(hits)
        problems += [] if hits else [f"{pattern!r} matches no parameter; paths are like {next(iter(named), 'w')!r}"]
    out = {path: leaf for path, leaf in named.items() if id(leaf) in found}
    trained = [
        f"{path}  {list(leaf.shape)}: it has requires_grad=True" for path, leaf in out.items() if leaf.requires_grad
    ]
    if problems or trained:
        remedy = (
            "An ignored parameter is no leaf and gets no gradient: call requires_grad_(False), or leave it in the "
            "tree. To train a tensor on each rank by itself, stack those of all ranks: fs.Rule(path, P(axis), "
            "compute=P(axis))."
        )
        raise errors.PlanError(errors.lines("ignore= of fs.split:", problems + trained, remedy))
    return out


def _distinct(places: Sequence[Place]) -> list[Place]:
    """Distinct places: a module reached by two paths has one dict."""
    return list({(id(entries), name): (entries, name) for entries, name in places}.values())


def _whole(leaf: Tensor) -> tuple[int, ...] | None:
    """The shape of the whole leaf that a tensor holds, or holds a part of; None if it is unknown."""
    slot = slot_of(leaf)
    return tuple(leaf.shape) if slot is None else slot.shape


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    # Leaves may be tensors of a class that answers each question in Python.
    with torch._C.DisableTorchFunctionSubclass():
        return [getattr(leaf, "shape", None) for leaf in leaves]
