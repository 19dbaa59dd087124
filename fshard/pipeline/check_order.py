"""Checking an order: all ranks run together, on nothing but the rules of dependencies.

The check knows nothing of how orders are made, so it holds one that was parsed, read from a file or written by hand to
the same rules.
"""

from collections import Counter
from collections.abc import Iterator

from fshard.pipeline import pipeline_refusals
from fshard.pipeline.order_steps import play
from fshard.pipeline.orders import PipelineOrder, lanes
from fshard.pipeline.pipeline_actions import BACKWARDS, KINDS, Action, Result, needs, results

CONTEXT = 4
"""Time steps shown before and after an action that breaks a rule."""

Place = tuple[int, int]
"""A rank, and a position in its list."""

Problems = Iterator[tuple[str, Place | None]]
"""What is wrong, and where."""


def check_order(order: PipelineOrder) -> None:
    """Check that ranks can run an order, and that it computes every microbatch once.

    * Each action is on the rank that is the home of its stage.
    * Each stage has, for each microbatch, one F, and either one B or one I and one W.
    * The backwards of a stage run in the order of microbatches.
    * No ranks wait for each other in a circle: F waits for the F of the stage before, B and I for their own F and for
      the B or I of the next stage, W for its own I.
    * What one rank sends to another one is read in the order in which it was sent, forwards and backwards each.

    Args:
        order: any order.

    Raises:
        ScheduleError: a rule is broken. The message shows what all ranks do around the action.

    >>> from fshard.pipeline import make_order, parse
    >>> check_order(make_order("zbv", 4, 9))
    >>> check_order(parse("pipeline mine\\nhomes 0 1\\nrank 0 0F0 0B0\\nrank 1 1B0 1F0"))
    Traceback (most recent call last):
    fshard.errors.ScheduleError: the order mine cannot run: rank 1 waits at 1B0 for 1F0, which it runs later...
    """
    for rule in (_homes, _counts, _backward_turns, _circles, _queues):
        for problem, at in rule(order):
            excerpt = lanes(order.ranks, order.stages, at, CONTEXT if at else 2 * CONTEXT)
            raise pipeline_refusals.broken_order(order.name, problem, excerpt)


def _homes(order: PipelineOrder) -> Problems:
    """Find actions on ranks that do not hold their stage."""
    for rank, lane in enumerate(order.ranks):
        for number, action in enumerate(lane):
            if action.stage >= order.stages:
                yield f"{action} is of stage {action.stage}, and there are {order.stages} stages", (rank, number)
            elif order.homes[action.stage] != rank:
                home = order.homes[action.stage]
                yield f"{action} is on rank {rank}, and stage {action.stage} is on rank {home}", (rank, number)


def _counts(order: PipelineOrder) -> Problems:
    """Find actions that are there twice or not at all."""
    found = Counter([action for lane in order.ranks for action in lane])
    places = {action: place for place, action in _placed(order)}
    if not found:
        yield "it has no actions", None
    for stage in range(order.stages):
        for microbatch in range(order.microbatches):
            own = [Action(stage, kind, microbatch) for kind in KINDS]
            forward, whole, inputs, weights = [found[action] for action in own]
            at = next((places[action] for action in own if found[action]), None)
            if forward != 1:
                yield f"{own[0]} is there {_times(forward)}", places.get(own[0], at)
            elif whole + inputs != 1:
                what = f"{_times(whole)} {own[1]} and {_times(inputs)} {own[2]}"
                yield f"stage {stage} has for microbatch {microbatch} {what}, and needs one of both", at
            elif weights != inputs:
                due = f"one goes with {own[2]}" if inputs else f"none goes with {own[1]}"
                yield f"{own[3]} is there {_times(weights)}, and {due}", places.get(own[3], at)


def _times(count: int) -> str:
    return {0: "not once", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _backward_turns(order: PipelineOrder) -> Problems:
    """Find backwards of one stage that are not in the order of microbatches."""
    last: dict[int, Action] = {}
    for place, action in _placed(order):
        if action.kind in BACKWARDS:
            before = last.get(action.stage, action)
            if before.microbatch > action.microbatch:
                yield f"{action} comes after {before}: a stage's backwards go in the order of microbatches", place
            last[action.stage] = action


def _circles(order: PipelineOrder) -> Problems:
    """Find ranks that wait for each other."""
    made = {result: action for _, action in _placed(order) for result in results(action)}
    played = play(order.ranks, order.stages, lambda action: 1.0)
    missing, rank, trail = played.missing, min(played.missing, default=-1), []
    while rank in missing and rank not in trail:
        trail.append(rank)
        rank = order.homes[missing[rank][1]]
    if not trail:
        return
    circle = trail[trail.index(rank) :]
    at = {rank: len(played.ends[rank]) for rank in circle}
    if len(circle) == 1:
        waits = f"at {order.ranks[rank][at[rank]]} for {made[missing[rank]]}"
        yield f"rank {rank} waits {waits}, which it runs later", (rank, at[rank])
    steps = []
    for rank in circle:
        wanted = made[missing[rank]]
        steps.append(f"rank {rank} at {order.ranks[rank][at[rank]]} for {wanted} of rank {order.homes[wanted.stage]}")
    yield f"ranks wait for each other: {', '.join(steps)}", (circle[0], at[circle[0]])


def _queues(order: PipelineOrder) -> Problems:
    """Find results that are read in another order than they are sent.

    Messages from one rank to another one travel in one queue for forwards and one for backwards.
    """
    sent: dict[tuple[int, int, str], list[Result]] = {}
    read: dict[tuple[int, int, str], list[tuple[Result, Place]]] = {}
    for place, action in _placed(order):
        for kind, stage, microbatch in needs(action, order.stages):
            if order.homes[stage] != place[0]:
                key = order.homes[stage], place[0], kind
                read.setdefault(key, []).append(((kind, stage, microbatch), place))
        for result in results(action):
            kind, stage, _ = result
            reader = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= reader < order.stages and order.homes[reader] != place[0]:
                sent.setdefault((place[0], order.homes[reader], kind), []).append(result)
    made = {result: action for _, action in _placed(order) for result in results(action)}
    for key, queue in sent.items():
        for result, (wanted, place) in zip(queue, read[key], strict=True):
            if result != wanted:
                taker = order.ranks[place[0]][place[1]]
                sends = f"rank {key[0]} sends {made[result]} to rank {key[1]} before {made[wanted]}"
                yield f"{sends}, and {taker} reads {made[wanted]} first", place


def _placed(order: PipelineOrder) -> Iterator[tuple[Place, Action]]:
    """All actions with their places, rank by rank."""
    for rank, lane in enumerate(order.ranks):
        for number, action in enumerate(lane):
            yield (rank, number), action
