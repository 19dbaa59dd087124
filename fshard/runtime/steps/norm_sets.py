"""Gradient norms that the metrics of a step have besides that of all leaves: by group, or by pattern on paths."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fshard.errors import PlanError, lines
from fshard.optim import checks
from fshard.patterns import meant_by
from fshard.runtime.execution import Gradients
from fshard.runtime.memory.optimizer_layout import merge_slices
from fshard.runtime.steps.clip import norms_by_rule
from fshard.runtime.steps.readings import RuleNorms
from fshard.sharding.plan import Plan

GROUPS = "groups"
"""Stands for the norm of each group."""


@dataclass(frozen=True)
class NormSets:
    """Sets of leaves whose gradient norms are asked for.

    Attributes:
        names: of the sets: patterns, or names of groups.
        grads: the gradients, cut by pattern; None for whole groups.
        groups: the ids of these groups, if sets are groups.
    """

    names: tuple[str, ...]
    grads: Gradients | None = None
    groups: tuple[int, ...] = ()

    def norms(self, plan: Plan, known: Mapping[int, tuple[float, Tensor]]) -> list[RuleNorms]:
        """The norms of this rank's part of each set, each after the part of its elements that this rank counts.

        Args:
            plan: the plan.
            known: the norms of groups, by id. A group may be missing if this rank holds nothing of it.
        """
        if self.grads is None:
            return [[known[group]] if group in known else [] for group in self.groups]
        return norms_by_rule(len(self.names), plan, self.grads)

    def of(self, grads: Gradients) -> "NormSets":
        """The same sets of other gradients."""
        return self if self.grads is None else replace(self, grads=grads.cut(self.grads.update_slices))


def read_norms(value: Any, plan: Plan) -> tuple[str, ...] | None:
    """Return what ``norms=`` of a train step says: patterns on paths; none for groups.

    Raises:
        PlanError: neither ``"groups"`` nor patterns, or a pattern that matches no trained leaf.
    """
    if value is None:
        return None
    if value == GROUPS:
        return ()
    if not isinstance(value, list | tuple) or not value:
        raise PlanError(f"norms={value!r} must be 'groups', or a list of regular expressions for paths")
    paths = [path for path, leaf in plan.leaves.items() if leaf.trainable]
    problems = [problem for i, pattern in enumerate(value) for problem in checks.pattern(f"norms[{i}]", pattern)]
    if not problems:
        used = {_number(value, path) for path in paths}
        idle = [pattern for i, pattern in enumerate(value) if i not in used]
        problems = [f"{pattern!r} decides no trained leaf{meant_by(pattern, paths)}" for pattern in idle]
    if problems:
        raise PlanError(lines("norms= does not fit the plan:", problems, "Patterns match whole paths; the first wins."))
    return tuple(value)


def watched(patterns: Sequence[str] | None, plan: Plan, grads: Gradients) -> NormSets | None:
    """The sets that ``read_norms`` has read; None for none.

    Args:
        patterns: the patterns; none of them stands for groups.
        grads: the gradients of a step.
    """
    if patterns is None:
        return None
    trained = [group for group in plan.groups if group.trainable]
    if not patterns:
        own = {group.name: group.id for group in trained}  # those of other stages have no number here
        names = tuple([group.name for group in (plan.whole or plan).groups if group.trainable])
        return NormSets(names, None, tuple([own.get(name, -1) for name in names]))
    cuts = {}
    for group in trained:
        limit = functools.partial(_limit, patterns, plan)
        merged = merge_slices(group.owned, plan.mesh, lambda path, shape: None, limit=limit)
        cuts[group.id] = tuple(cut for cut in merged if cut.limit >= 0)
    return NormSets(tuple(patterns), grads.cut(cuts))


def _limit(patterns: Sequence[str], plan: Plan, path: str) -> int:
    """The number of a leaf's set; -1 of one that has none, or that is not trained."""
    return _number(patterns, path) if plan.leaves[path].trainable else -1


def _number(patterns: Sequence[str], path: str) -> int:
    """The number of the first pattern that matches a path; -1 if none does."""
    return next((i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, path)), -1)
