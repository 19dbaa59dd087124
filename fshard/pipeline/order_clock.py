"""The time of an order, given what actions cost. Pure and deterministic."""

import math
from collections.abc import Callable, Iterator, Mapping

from fshard.pipeline import pipeline_refusals
from fshard.pipeline.check_order import check_order
from fshard.pipeline.order_steps import ActionTimes, play
from fshard.pipeline.orders import PipelineOrder

StageCost = float | Mapping[int, float] | Callable[[int], float]
"""Seconds of an action: equal for all stages, by stage, or a function of the stage."""


def times(
    order: PipelineOrder, forward: StageCost, input: StageCost, weight: StageCost, send: float = 0.0
) -> ActionTimes:
    """Find when each action starts and ends.

    An action starts when its rank is free and what it waits for has come. A rank computes while it sends.

    Args:
        order: an order that can run.
        forward: seconds of an F: a number, a mapping from each stage, or a function of the stage.
        input: the same of an I. A B takes as long as an I and a W.
        weight: the same of a W.
        send: seconds that a result takes from one rank to another one.

    Returns:
        For each rank, the ``starts`` and ``ends`` of its actions, in seconds from the begin of the step.

    Raises:
        PlanError: a cost is negative, infinite or no number, or a mapping lacks a stage.
        ScheduleError: ranks wait for each other.

    >>> from fshard.pipeline import make_order
    >>> times(make_order("1f1b", 2, 1), forward=1, input=lambda stage: 2 - stage, weight=1, send=0.5).ends
    ((1.0, 8.0), (2.5, 4.5))
    """
    costs = {kind: _by_stage(cost, order.stages) for kind, cost in (("F", forward), ("I", input), ("W", weight))}
    problems = [problem for kind, row in costs.items() for problem in _bad_costs(kind, row)]
    if problems := [*problems, *_bad_costs("send", [send])]:
        raise pipeline_refusals.bad_action_costs(problems)
    costs["B"] = [first + second for first, second in zip(costs["I"], costs["W"], strict=True)]
    if any(action.stage >= order.stages for lane in order.ranks for action in lane):
        check_order(order)
    played = play(order.ranks, order.stages, lambda action: costs[action.kind][action.stage], send)
    if played.missing:
        check_order(order)
    return played


def bubble(
    order: PipelineOrder,
    forward: StageCost = 1.0,
    input: StageCost = 1.0,
    weight: StageCost = 1.0,
    send: float = 0.0,
) -> float:
    """Compute the idle share of a step, averaged over the ranks.

    Args:
        order: an order that can run.
        forward, input, weight, send: as for ``times``. By default F, I and W take equally long, and B as long as two.

    Returns:
        A number from 0 to 1: what is idle of the time from the begin of the step to the end of the last rank.

    Raises:
        PlanError, ScheduleError: as for ``times``.

    >>> from fshard.pipeline import make_order
    >>> f"{bubble(make_order('1f1b', 4, 9)):.3f} {bubble(make_order('zb_h1', 4, 9)):.3f}"
    '0.250 0.100'
    """
    played = times(order, forward, input, weight, send)
    step = max([end for row in played.ends for end in row], default=0.0)
    pairs = zip(played.starts, played.ends, strict=True)
    busy = math.fsum([end - start for starts, ends in pairs for start, end in zip(starts, ends, strict=True)])
    return 1 - busy / (step * len(order.ranks)) if step else 0.0


def _by_stage(cost: StageCost, stages: int) -> list[float]:
    """The cost for each stage; nan where there is none."""
    if isinstance(cost, Mapping):
        return [cost.get(stage, math.nan) for stage in range(stages)]
    return [cost(stage) if callable(cost) else cost for stage in range(stages)]


def _bad_costs(name: str, costs: list[float]) -> Iterator[str]:
    """List the costs that are no times."""
    for stage, cost in enumerate(costs):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            lacking = isinstance(cost, float) and math.isnan(cost)
            of = "" if name == "send" else f" of stage {stage}"
            yield f"{name}{of} " + ("has no cost" if lacking else f"costs {cost!r}")
