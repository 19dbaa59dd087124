"""Counts of the microbatches that stages, and ranks, hold under an order: what simulations and docs are held to."""

from fshard.pipeline import PipelineOrder


def held(order: PipelineOrder) -> tuple[int, ...]:
    """Count the microbatches of which a stage holds values for its backward, where they are most.

    A stage holds a microbatch from its F to its B or W.
    """
    most = [0] * order.stages
    for lane in order.ranks:
        now = [0] * order.stages
        for action in lane:
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


def held_on_ranks(order: PipelineOrder) -> tuple[int, ...]:
    """Count the microbatches that all stages of a rank hold together, where they are most."""
    most = []
    for lane in order.ranks:
        now = [0]
        for action in lane:
            now.append(now[-1] + {"F": 1, "I": 0}.get(action.kind, -1))
        most.append(max(now))
    return tuple(most)
