"""Playing a pipeline: each rank runs its list in order and waits for results of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fshard.pipeline.pipeline_actions import Action, Result, needs, results

Lists = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""


@dataclass(frozen=True)
class ActionTimes:
    """Start and end of each action of each rank, as far as the ranks come.

    Attributes:
        starts: for each rank, the start of each action that runs.
        ends: the same for its end.
        missing: for each rank that does not come to its end, the result that it waits for.

    >>> play([[Action(0, "F", 0)], [Action(1, "F", 0)]], 2, lambda action: 1.0).starts
    ((0.0,), (1.0,))
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    missing: dict[int, Result]


def play(ranks: Lists, stages: int, seconds: Callable[[Action], float], send: float = 0.0) -> ActionTimes:
    """Run the lists of all ranks together.

    An action starts when its rank is free and all that it waits for is there. Ranks are free while they send.

    Args:
        ranks: the actions of each rank, in order.
        stages: the number of stages.
        seconds: how long an action takes.
        send: how long a result takes from one rank to another one.

    Returns:
        The times of all actions that can run.

    >>> lists = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    >>> play(lists, 2, lambda action: 1.0, send=0.5).starts
    ((0.0, 4.0), (1.5, 2.5))
    >>> play(lists[:1], 2, lambda action: 1.0).missing
    {0: ('I', 1, 0)}
    """
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    made: dict[Result, tuple[float, int]] = {}
    waiting: dict[Result, list[int]] = {}
    missing: dict[int, Result] = {}
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        missing.pop(rank, None)
        for action in ranks[rank][len(ends[rank]) :]:
            wanted = needs(action, stages)
            lacking = next((result for result in wanted if result not in made), None)
            if lacking is not None:
                missing[rank] = lacking
                waiting.setdefault(lacking, []).append(rank)
                break
            arrivals = [made[result][0] + send * (made[result][1] != rank) for result in wanted]
            starts[rank].append(max([*ends[rank][-1:], *arrivals], default=0.0))
            ends[rank].append(starts[rank][-1] + seconds(action))
            for result in results(action):
                made.setdefault(result, (ends[rank][-1], rank))
                runnable += waiting.pop(result, [])
    return ActionTimes(tuple(map(tuple, starts)), tuple(map(tuple, ends)), missing)
