"""The counts of updates by leaf: some leaves began to train later than others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fshard.sharding.plan import Plan


class After(NamedTuple):
    """The next numbers of a state in an update.

    Attributes:
        more: how many steps are added to the state's.
        late: which leaves have had fewer updates than that, and how many fewer.
    """

    more: int
    late: dict[str, int]


@dataclass(frozen=True)
class Ages:
    """The counts with which an update takes the leaves of states that are late by so much.

    Each leaf has its own number of updates, by which its moments are corrected. The step is the largest of them, but
    for leaves whose moments come from another run, which had more: these are late by less than nothing.

    Attributes:
        late: how many updates fewer than the step each leaf has had; leaves that are not in it have had all.
        least: how many fewer the oldest leaf that is updated has had.
        relative: how many updates fewer than that leaf each updated leaf has had, where it is any.
        after: the numbers of the state after the update.
    """

    late: Mapping[str, int]
    least: int
    relative: Mapping[str, int]
    after: After


def ages_of(late: Mapping[str, int], updated: Sequence[str], trained: Sequence[str]) -> Ages:
    """Say how an update counts leaves.

    Args:
        late: of the state.
        updated: the leaves that it updates.
        trained: all trained leaves of the plan.

    >>> ages_of({}, ["a"], ["a", "b"]).after
    After(more=1, late={'b': 1})
    >>> ages_of({"b": 1}, ["b"], ["a", "b"]).after
    After(more=0, late={})
    >>> ages_of({"a": -6}, ["a"], ["a"]).after
    After(more=1, late={'a': -6})
    """
    own = {path: late.get(path, 0) for path in updated}
    every = {path: late.get(path, 0) + (path not in own) for path in trained}
    least, fewest = min(own.values()), max(0, min(every.values()))
    relative = {path: missed - least for path, missed in own.items() if missed > least}
    after = {path: missed - fewest for path, missed in every.items() if missed != fewest}
    return Ages(dict(late), least, relative, After(1 - fewest, after))


def trained_leaves(plan: Plan) -> list[str]:
    """The paths of all trained leaves of a plan."""
    return [path for path, leaf in plan.leaves.items() if leaf.trainable]


def after_call(begun: int, updated: int, late: Mapping[str, int], trained: Sequence[str]) -> tuple[int, dict[str, int]]:
    """A state's step and late leaves after a call of a step function: one step more, however many updates it made.

    Random streams, numbers and checkpoints go by the calls; what an optimizer counts, the step less ``late``, stays.
    Leaves that have had more updates than there were calls are late by less than nothing.

    Args:
        begun: the state's step before the call.
        updated: its step by the updates of the call.
        late: its late leaves by them.
        trained: all trained leaves of the plan.

    >>> after_call(4, 5, {}, ["a"]), after_call(4, 4, {}, ["a"]), after_call(4, 6, {"b": 1}, ["a", "b"])
    ((5, {}), (5, {'a': 1}), (5, {'a': -1}))
    """
    more = begun + 1 - updated
    if not more:
        return updated, dict(late)
    moved = {path: late.get(path, 0) + more for path in trained}
    return begun + 1, {path: missed for path, missed in moved.items() if missed}
