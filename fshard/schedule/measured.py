"""A run as it was, in the form of a simulation, so that the two can be compared, printed and drawn alike."""

from collections.abc import Mapping, Sequence

from fshard import errors
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation
from fshard.schedule.transfers import awaited


def measured(
    schedule: Schedule, times: Sequence[float], arrivals: Mapping[int, tuple[float, float]] | None = None
) -> Simulation:
    """What a step did, and when.

    Args:
        times: when each op began, in seconds, and when the last one was over.
        arrivals: begin and end of transfers, by the number of the op that issues them, where they are known. Else they
            are taken to last from their issue to the end of the op that waits for them.

    >>> from fshard.schedule import Call, GroupInfo, Policy, Program, Transfer, build
    >>> group = GroupInfo("layer", 200, 100, 0, False, (Transfer("all_gather", "state", "param", sent=100),))
    >>> schedule = build(Program((Call("layer"),), (), {"layer": (0,)}), [group], Policy(), train=False)
    >>> [op.kind for op in schedule]
    ['handshake', 'all_gather', 'forward', 'wait all_gather', 'forward', 'free', 'backward']
    >>> print(measured(schedule, [10, 10, 11, 12, 14, 15, 15, 15]))
    step 5.000 s: compute 3.000 s, wire 4.000 s for 100 B sent, exposed 2.000 s
       2.000 s  wait all_gather layer
    """
    if len(times) != len(schedule) + 1:
        raise errors.bad_costs([f"{len(times)} times for {len(schedule)} ops: give one more, the end"])
    issued = [time - times[0] for time in times]
    starts, ends = list(issued[:-1]), list(issued[1:])
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers if move.row.link}
    under_way: dict[tuple[str, str], int] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    held, total = 0.0, 0
    for at, op in enumerate(schedule):
        row = awaited(op.kind)
        if (op.kind, op.target) in moves:
            under_way[op.kind, op.target] = at
            total += moves[op.kind, op.target].sent
        elif row is not None and (row.name, op.target) in moves:
            held += ends[at] - starts[at]
            begun = under_way.pop((row.name, op.target))
            ends[begun] = ends[at]
            if arrivals and begun in arrivals:
                starts[begun], ends[begun] = (time - times[0] for time in arrivals[begun])
            spans.setdefault(moves[row.name, op.target].axes, []).append((starts[begun], ends[begun]))
    wire = max(map(covered, spans.values()), default=0.0)
    return Simulation(schedule, tuple(issued[:-1]), tuple(starts), tuple(ends), issued[-1] - held, wire, total)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of these spans is under way.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one span of each kind is under way.

    >>> common([(0, 2), (5, 6)], [(1, 3), (1, 5.5)])
    1.5
    """
    return covered(first) + covered(second) - covered([*first, *second])
