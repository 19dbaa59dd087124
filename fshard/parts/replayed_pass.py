"""A pass of a step function that this rank has run, and the numbers of it that ranks sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard import tree
from fshard.runtime.engine.loss_result import Mean, as_means, means_of
from fshard.runtime.steps.readings import Reading, pair
from fshard.runtime.steps.records import PassResult
from fshard.training.metrics import combine_aux


@dataclass(frozen=True)
class ReplayedPass:
    """A pass that this rank has run.

    Attributes:
        measured: what it came to.
        divisor: what its gradients were divided by before they were summed.
        parts: microbatches of the global batch.
    """

    measured: PassResult
    divisor: float
    parts: int

    @property
    def total(self) -> Reading:
        """The total and the count over its microbatches; zeros of an evaluation."""
        return pair(self.measured.losses)

    @property
    def means(self) -> list[Reading]:
        """The total and the count of each auxiliary mean, over its microbatches."""
        columns = zip(*[means_of(as_means(aux)) for aux in self.measured.aux], strict=True)
        return [pair((mean.total, mean.count) for mean in column) for column in columns]


def marked(parts: Sequence[Any]) -> Any:
    """The auxiliary values of all microbatches as one, with ``fs.Mean`` where they are means over ranks."""
    if not parts or not tree.leaves(parts[0]):
        return parts[0] if parts else {}
    parts = [*map(as_means, parts)]
    marks = [leaf if isinstance(leaf, Mean) else None for leaf in tree.leaves(parts[0])]
    whole = combine_aux(parts, [0.0] * len(means_of(parts[0])))
    leaves, spec = tree.flatten(whole)
    return tree.unflatten(spec, [leaf if mark is None else mark for leaf, mark in zip(leaves, marks, strict=True)])
