"""The fit of an optimizer and a plan: every problem in one report, before anything is made."""

import inspect
from collections.abc import Mapping

import torch

from fshard.arguments import alike, described
from fshard.errors import PlanError, lines
from fshard.optim.base import Optimizer
from fshard.optim.checks import is_optimizer
from fshard.optim.contract import Contract, contract
from fshard.optim.form import Grain, LeafInfo
from fshard.optim.own_rule import check_own_rules
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.plan import Plan
from fshard.sharding.wire import FIELDS


def check_optimizer(plan: Plan, opt: Optimizer) -> Contract:
    """The contract of an optimizer that names leaves of the plan, and needs no more of one than a rank holds.

    What it finds does not depend on how many ranks an axis has: what works on one mesh works on all.

    Raises:
        PlanError: patterns that match nothing, frozen leaves that are to be trained, and rules that are not elementwise
            on leaves that are cut.
    """
    if not is_optimizer(opt):
        named = f"fs.optim.from_torch(torch.optim.{type(opt).__name__}, ...)"
        remedy = named if isinstance(opt, torch.optim.Optimizer) else "such as fs.optim.adamw(1e-3)"
        raise PlanError(f"opt is {described(opt)}, not an optimizer of fs.optim: give one, {remedy}")
    rounded = {path: _rounded(group) for path, (group, _) in plan.places().items()}
    infos = [LeafInfo(path, leaf.shape, leaf.trainable, rounded[path]) for path, leaf in plan.leaves.items()]
    made = contract(opt)
    problems = [*made.problems(infos)]
    grains = [
        (leaf, made.grain(opt.hyper(leaf.path, leaf.shape)))
        for group in plan.groups
        for leaf in group.owned.leaves
        if leaf.trainable
    ]
    problems += alike(
        (f"{leaf.path}  {list(leaf.shape)}", f"  {leaf.at_rest}: {problem}")
        for leaf, grain in grains
        if not problems or len(leaf.shape) > 1 or grain != "matrix"  # else it is named for being no matrix
        for problem in _cut(leaf, grain)
    )
    if problems:
        raise PlanError(
            lines(
                f"the optimizer {type(opt).__name__} does not fit the plan:",
                problems,
                "Change the plan's rules or the optimizer.",
            )
        )
    _check_own_rules(plan, made)
    return made


def _check_own_rules(plan: Plan, made: Contract) -> None:
    mesh = plan.mesh
    if mesh.device_here and mesh.device.type != "meta":  # a process that only plans updates nothing
        trained = (leaf for leaf in plan.leaves.values() if leaf.trainable)
        check_own_rules(made, next((made.hyper(leaf.path, leaf.shape) for leaf in trained), None), mesh.device)


def check_late(opt: Optimizer, late: Mapping[str, int]) -> None:
    """Refuse an optimizer that cannot be told that a leaf has had fewer updates than others.

    Raises:
        PlanError: its ``update`` has no argument ``late``.
    """
    given = inspect.signature(opt.update).parameters
    if late and "late" not in given and not any(p.kind is p.VAR_KEYWORD for p in given.values()):
        rows = [f"{path}: since step {n}" if n > 0 else f"{path}: {-n} more than steps" for path, n in late.items()]
        remedy = (
            "Give its update the argument late: int = 0, the updates there were before a leaf began to train; a rule "
            "without a bias correction may ignore it."
        )
        raise PlanError(
            lines(f"{type(opt).__name__}.update takes no late=, and leaves have own numbers of updates:", rows, remedy)
        )


def _rounded(group: Group) -> str:
    """The wire format to which a group's gradients are rounded before they are summed; empty where sums are exact."""
    return next((str(form) for kind, form in group.wires.items() if FIELDS[kind] == "reduce"), "")


def _cut(leaf: Leaf, grain: Grain) -> list[str]:
    """Return what keeps an optimizer from seeing enough of a leaf in one piece."""
    if grain == 1:
        return []
    local = [dim for dim, entry in enumerate(leaf.at_rest.dims) if entry is not None]
    first = len(leaf.shape) - 2 if grain == "matrix" else 0
    if [dim for dim in local if dim >= first]:
        return [f"its rule needs {_what(grain)}, and dim {local[-1]} is cut: use flat= and align, or another optimizer"]
    if leaf.at_rest.flat is None:
        return []
    if isinstance(grain, int):
        fits = leaf.align == "leaf" or (isinstance(leaf.align, int) and leaf.align % grain == 0)
        remedy = f"fs.Rule(pattern, spec, align={grain})"
    else:
        fits, remedy = leaf.align == "leaf", 'fs.Rule(pattern, spec, align="leaf")'
    return [] if fits else [f"its rule needs {_what(grain)} on one rank, and a flat shard cuts anywhere: use {remedy}"]


def _what(grain: Grain) -> str:
    if isinstance(grain, int):
        return f"blocks of {grain} elements"
    return "whole matrices" if grain == "matrix" else "the whole leaf"
