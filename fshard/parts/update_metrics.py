"""Metrics of an update, and the gradient norms that it needs: for clipping, and for its metrics."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fshard.runtime.execution import Gradients
from fshard.runtime.memory.gradients import norms_of, share_of
from fshard.runtime.steps.clip import Clip, norms_by_rule
from fshard.runtime.steps.consensus import joint_norm, root
from fshard.runtime.steps.norm_sets import NormSets
from fshard.runtime.steps.readings import RuleNorms
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of an update.

    Attributes:
        grad_norm: the norm of the gradients of the updated leaves before clipping, 0-dim, float32 or wider, equal on
            all ranks. Where ``fs.optim.every`` updates, it is that of the mean over its calls.
        skipped: whether nothing was updated, since the gradient was not finite at this loss scale, or its norm exceeds
            ``skip_norm=`` or is not finite, or ``skip=`` said so; 0-dim, bool.
        grad_norms: norms before clipping, by name: of the leaves of each rule of ``clip_norm=[...]``, and of what
            ``make_update(norms=)`` asks for; as ``grad_norm``.
    """

    grad_norm: Tensor
    skipped: Tensor
    grad_norms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateNorms:
    """Sets of leaves whose gradient norms ranks sum: first those of each clipping rule, then what is watched.

    Attributes:
        chosen: the plan in which every leaf is frozen that the update leaves alone.
        clip: the limits of gradient norms.
        watch: the sets that the metrics have besides; None for none.
    """

    plan: Plan
    chosen: Plan
    clip: Clip
    watch: NormSets | None

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the norms in the metrics: of several clipping rules, and of what is watched."""
        rules = [pattern for pattern, _ in self.clip.rules] if self.clip.apart else []
        return rules + [*(self.watch.names if self.watch is not None else ())]

    @functools.cached_property
    def sets(self) -> int:
        """The number of sets."""
        return len(self.clip.rules) + (len(self.watch.names) if self.watch is not None else 0)

    def of(self, gradients: Gradients, whole: bool) -> list[RuleNorms]:
        """The norms of this rank's gradients, by set.

        Args:
            gradients: what an update reads.
            whole: whether all that lies in their chunks is updated.
        """
        known: dict[int, tuple[float, Tensor]] = {}
        if whole and not self.clip.apart or self.watch is not None and self.watch.grads is None:
            norms = norms_of([gradients.shards[group] for group in self._shares])
            known = {group: (self._shares[group], norm) for group, norm in zip(self._shares, norms, strict=True)}
        alone = whole and not self.clip.apart
        found: list[RuleNorms] = [[*known.values()]]
        if not alone:
            found = norms_by_rule(len(self.clip.rules), self.plan, gradients)
        return found if self.watch is None else [*found, *self.watch.of(gradients).norms(self.plan, known)]

    @functools.cached_property
    def _shares(self) -> dict[int, float]:
        """The part of the elements of each group that this rank counts, of those of which any is updated."""
        held = [self.plan.groups[group.id] for group in self.chosen.groups if group.trainable and group.chunk]
        return {group.id: share_of(group, self.plan.mesh) for group in held}

    def clipped(self, squares: Sequence[float]) -> list[float]:
        """The norm of each clipping rule, of the squares of all sets."""
        return [*map(root, squares[: len(self.clip.rules)])]

    def norm(self, squares: Sequence[float], at: int = 0) -> float:
        """A norm, of the squares of all sets: of all leaves, or from 1 on that of a name."""
        rules = len(self.clip.rules)
        return root(squares[at - 1 + (0 if self.clip.apart else rules)]) if at else joint_norm(squares[:rules])
