"""Clipping gradients by norm: of all leaves together, or of the leaves of each rule by themselves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard.arguments import described
from fshard.errors import PlanError, lines
from fshard.optim import checks
from fshard.patterns import meant_by
from fshard.runtime.execution import Gradients
from fshard.runtime.memory.gradients import norms_of, share_of
from fshard.runtime.steps.readings import RuleNorms
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class Clip:
    """The limits of gradient norms.

    Attributes:
        rules: patterns for whole paths, and limits; None for no clipping. The first match wins.
    """

    rules: tuple[tuple[str, float | None], ...] = ((r"(?s:.*)", None),)

    @property
    def apart(self) -> bool:
        """Tell whether there are several norms."""
        return len(self.rules) > 1

    @property
    def clips(self) -> bool:
        """Tell whether anything is clipped."""
        return any(limit is not None for _, limit in self.rules)

    def number(self, path: str) -> int:
        """The number of a leaf's rule."""
        return next(i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, path))

    def factors(self, norms: Sequence[float]) -> list[float]:
        """Return what the gradients of each rule are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` does."""
        pairs = zip(self.rules, norms, strict=True)
        return [1.0 if limit is None else min(1.0, limit / (norm + 1e-6)) for (_, limit), norm in pairs]

    def divisors(self, scale: float, norms: Sequence[float]) -> list[float | None]:
        """Return what gradients are divided by, for each rule: ``None`` for 1.

        Args:
            scale: what they are multiplied by first.
            norms: what their norms are then.
        """
        return [divisor(scale * factor) for factor in self.factors(norms)]


def divisor(factor: float) -> float | None:
    """A factor as what gradients are divided by; None for 1."""
    return None if factor == 1.0 else 1.0 / factor


def read_clip(value: Any, plan: Plan) -> Clip:
    """Return what ``clip_norm=`` of a train step says.

    Raises:
        PlanError: an invalid limit, a pattern that decides no trained leaf, a trained leaf without a rule.
    """
    if value is None:
        return Clip()
    several = isinstance(value, list | tuple)
    rules = value if several else [(Clip().rules[0][0], value)]
    problems = [] if rules else ["clip_norm=[] has no rule"]
    for i, rule in enumerate(rules):
        problems += _rule_problems(f"clip_norm[{i}]" if several else "clip_norm", rule)
    if problems:
        raise PlanError(lines("invalid limits of gradient norms:", problems, "Give a number, or rules on paths."))
    clip = Clip(tuple((pattern, None if limit is None else float(limit)) for pattern, limit in rules))
    if several:
        _check_rules(clip, plan)
    return clip


def _rule_problems(where: str, rule: Any) -> list[str]:
    if not isinstance(rule, tuple) or len(rule) != 2:
        return [f"{where} = {rule!r}: must be a pair (pattern, limit)"]
    problems = checks.pattern(f"{where}[0]", rule[0])
    if rule[1] is not None and checks.number(where, rule[1], "(0, inf)"):
        number = isinstance(rule[1], int | float) and not isinstance(rule[1], bool)
        told = f"{where}={rule[1]!r} must be" if number else f"{where} is {described(rule[1])}: give a number that is"
        problems = [*problems, f"{told} positive, or None for no clipping"]
    return problems


def _check_rules(clip: Clip, plan: Plan) -> None:
    paths = [path for path, leaf in plan.leaves.items() if leaf.trainable]
    missed = [path for path in paths if not any(re.fullmatch(pattern, path) for pattern, _ in clip.rules)]
    problems = [f"{path}: no pattern matches it" for path in missed]
    if not missed:
        used = {clip.number(path) for path in paths}
        idle = [pattern for i, (pattern, _) in enumerate(clip.rules) if i not in used]
        problems = [f"{pattern!r} decides no trained leaf{_meant(pattern, paths)}" for pattern in idle]
    if problems:
        remedy = (
            "Patterns must match whole paths; the first match wins. End with (r'.*', limit), or None for no clipping."
        )
        raise PlanError(lines("clip_norm= does not fit the plan:", problems, remedy))


def _meant(pattern: str, paths: Sequence[str]) -> str:
    """Return what a pattern that decides nothing was meant to be; or nothing, if earlier ones take what it matches."""
    return "" if any(re.fullmatch(pattern, path) for path in paths) else meant_by(pattern, paths)


def norms_by_rule(rules: int, plan: Plan, grads: Gradients) -> list[RuleNorms]:
    """The norms of this rank's summed gradients, of the leaves of each of so many rules."""
    found: list[list[tuple[float, Tensor]]] = [[] for _ in range(rules)]
    for group, slices in grads.update_slices.items():
        if slices:
            share = share_of(plan.groups[group], plan.mesh)
            for cut, norm in zip(slices, norms_of(grads.slices(group)), strict=True):
                found[cut.limit].append((share, norm))
    return [*found]
