"""What a unit reads, and whether its leaves have gradients."""

import operator
from collections.abc import Sequence

from torch import Tensor

from fshard.errors import UnitError
from fshard.runtime.slots import Slots
from fshard.sharding.plan import Plan

MOST = 12
"""Leaves that an error lists."""


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

    def told(self, unit: str, plan: Plan) -> str:
        """What to say of an error inside of the unit: its author sees sizes of parts there, and specs elsewhere."""
        leaves = [plan.leaves[path] for path in self.paths]
        rows = [
            f"  {leaf.path}  {list(leaf.shape)}: {list(leaf.compute_shape)}, by {leaf.compute}"
            for leaf in leaves
            if leaf.compute_shape != leaf.shape
        ]
        if not rows:
            return f"This was in unit {unit}."
        more = [f"  ... and {len(rows) - MOST} more"] if len(rows) > MOST else []
        head = f"This was in unit {unit}. Of these leaves each rank has a part there:"
        remedy = (
            "Code that needs all of a leaf needs a rule without that axis; other code needs the sizes of parts, "
            "such as fs.parallel.local_heads(heads)."
        )
        return "\n".join([head, *rows[:MOST], *more, remedy])

    def written(self, unit: str, watched: Sequence[Tensor], versions: Sequence[int]) -> UnitError:
        """The error of a unit that wrote in place to its inputs or leaves, which had these versions before."""
        count = len(watched) - len(self.paths)
        changed = [i for i, x in enumerate(watched) if x._version != versions[i]]
        what = [f"parameter {self.paths[i - count]}" if i >= count else f"input {i}" for i in changed]
        return UnitError(
            f"unit {unit} wrote in place to {', '.join(what)}: units are pure functions, so return new values "
            f"(x = x + y, not x += y), or clone what is to be changed"
        )

    def aliased(self, unit: str, number: int) -> UnitError:
        """The error of a unit one of whose outputs is a view of a leaf."""
        some = ", ".join(self.paths[:4]) + (", ..." if len(self.paths) > 4 else "")
        return UnitError(
            f"output {number} of unit {unit} is a view of one of its parameters ({some}), whose memory will hold "
            f"another unit's weights: return a copy (.clone()), or read the parameter where it is used"
        )


_GRAD = operator.attrgetter("grad")
_NONE = frozenset((None,))


def bare(leaves: Sequence[Tensor]) -> bool:
    """Whether no leaf has a gradient. All leaves are asked several times a step."""
    return _NONE.issuperset(map(_GRAD, leaves))


def prefix(paths: Sequence[str]) -> str:
    """The longest path that all of these start with; all of them, if there is none."""
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or ",".join(paths)
