"""What a unit reads, and whether its leaves have gradients."""

import operator
from collections.abc import Sequence

from torch import Tensor

from fshard.runtime.slots import Slots
from fshard.sharding.plan import Plan


class Reads:
    """Which leaves a unit reads: their paths in the order of its flat leaves, and by group.

    Attributes:
        sinks: of the groups that are trained, the numbers of these leaves, and the leaves.
    """

    def __init__(self, paths: Sequence[str], plan: Plan, slots: Slots) -> None:
        places = plan.places()
        self.paths = tuple(paths)
        self.groups: dict[int, list[int]] = {}
        for path in dict.fromkeys(paths):  # a leaf that is given twice has one gradient
            group, number = places[path]
            self.groups.setdefault(group.id, []).append(number)
        trained = [(g, numbers) for g, numbers in self.groups.items() if plan.groups[g].trainable]
        self.sinks = [(g, numbers, [slots.groups[g].leaves[n] for n in numbers]) for g, numbers in trained]


_GRAD = operator.attrgetter("grad")
_NONE = frozenset((None,))


def bare(leaves: Sequence[Tensor]) -> bool:
    """Whether no leaf has a gradient. All leaves are asked several times a step."""
    return _NONE.issuperset(map(_GRAD, leaves))
