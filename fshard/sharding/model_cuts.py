"""The cuts of leaves that a model's own code expects, where code around its modules communicates over an axis."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fshard.errors import PlanError, lines
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.rules import Rule
from fshard.sharding.spec import P, Shape, axes_of


class ModelCut(NamedTuple):
    """The cut of a leaf: along ``dim`` over ``axis``; ``local`` if that is a data axis, which never gathers it."""

    axis: str
    dim: int
    local: bool

    def spec(self, shape: Shape, flat: Axes) -> P:
        """The spec at rest of a leaf of this shape, whose rest is flat-sharded."""
        dims = tuple(self.axis if dim == self.dim else None for dim in range(len(shape)))
        return P(*dims, flat=flat if len(flat) > 1 else flat[0] if flat else None)


def model_cuts(model: Any) -> dict[str, ModelCut]:
    """The cuts that code around the modules of a model expects, by the path of the leaf; empty for trees and others.

    Raises:
        PlanError: modules that share a leaf expect different cuts of it.
    """
    around: Mapping[str, Any] = getattr(model, "around", {})
    found: dict[str, ModelCut] = {}
    wrong = []
    for owner, call in around.items():
        for name, dim, _ in call.cuts:
            path = f"{owner}.{name}" if owner else name
            first = model.aliases.get(path, path)
            cut = ModelCut(call.axis, dim, call.local)
            if found.setdefault(first, cut) != cut:
                wrong.append(f"{path}, which is {first}: along dim {dim}, not {found[first].dim}")
    if wrong:
        raise PlanError(lines("modules that share a leaf expect different cuts of it:", wrong, _DROP))
    return found


_DROP = "Take one of them out of the model's plan: fs.parallel.parallelize(model, mesh, {'lm_head': None})."


def cut_rules(cuts: Mapping[str, ModelCut], shapes: Mapping[str, Shape], flat: Axes) -> list[Rule]:
    """A rule for the cut leaves of each kind of layer; leaves that differ in nothing but numbers of layers share one.

    >>> shapes = {f"layers.{i}.up.weight": (8, 4) for i in range(3)}
    >>> cut_rules(dict.fromkeys(shapes, ModelCut("tp", 0, False)), shapes, ("data",))
    [Rule('layers\\\\.\\\\d+\\\\.up\\\\.weight', P('tp', None, flat='data'))]
    """
    made: dict[str, Rule] = {}
    for pattern, paths in _alike(shapes).items():
        rules = {path: _rule(path, cuts[path], shapes[path], flat) for path in paths if path in cuts}
        specs = {(rule.at_rest, rule.compute) for rule in rules.values()}
        if len(specs) == 1 and len(rules) == len(paths):
            one = next(iter(rules.values()))
            made[pattern] = Rule(pattern, one.at_rest, one.compute)
        else:
            made |= {rule.pattern: rule for rule in rules.values()}
    return list(made.values())


def _rule(path: str, cut: ModelCut, shape: Shape, flat: Axes) -> Rule:
    return Rule(re.escape(path), cut.spec(shape, flat), P(cut.axis) if cut.local and cut.dim == 0 else None)


def _alike(paths: Iterable[str]) -> dict[str, list[str]]:
    """The paths by pattern, in which ``\\d+`` stands for the numbers between dots."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parts = [r"\d+" if part.isdigit() else re.escape(part) for part in path.split(".")]
        found.setdefault(r"\.".join(parts), []).append(path)
    return found


def check_cuts(cuts: Mapping[str, ModelCut], leaves: Mapping[str, Leaf], mesh: Mesh) -> None:
    """Refuse a plan that does not cut the leaves as the model's code expects.

    Raises:
        PlanError: the mesh has the axis, and leaves are whole along it, or cut otherwise.
    """
    wrong = []
    for path, cut in cuts.items():
        leaf = leaves.get(path)
        if leaf is None or mesh.shape.get(cut.axis, 1) == 1:
            continue
        entries = [axes_of(entry) for entry in leaf.compute.dims]
        here = entries[cut.dim] if cut.dim < len(entries) else ()
        if here != (cut.axis,) or sum(cut.axis in axes for axes in entries) > 1:
            wrong.append(f"{path}  {list(leaf.shape)}: {leaf.compute}, expected {cut.axis!r} along dim {cut.dim}")
    if wrong:
        raise PlanError(
            lines(
                "code around the model's modules (fs.parallel.parallelize) expects leaves that are cut, in compute:",
                wrong,
                "Begin the rules with fs.suggest_rules(model, mesh), or plan for the model that was not parallelized.",
            )
        )
