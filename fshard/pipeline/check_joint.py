"""Checking the schedules of all positions of a pipeline together: sends have receives, and no rank waits for good.

Each schedule was checked alone. Here they run side by side on nothing but the rules of messages: a message arrives when
it was sent and its receive was posted, and messages on one lane come in one order on both sides.
"""

from collections.abc import Mapping, Sequence

from fshard.pipeline import staged_refusals
from fshard.pipeline.rank_program import Lane
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule

Key = tuple[str, int]
"""An edge and a microbatch."""


def check_joint(schedules: Sequence[Schedule], lanes: Mapping[str, Lane]) -> None:
    """Run the schedules of all positions together.

    Args:
        schedules: by position.
        lanes: the lane of each edge, by name.

    Raises:
        ScheduleError: a message has no partner, two come in different orders, or ranks wait for each other.
    """
    _check_orders(schedules, lanes)
    done: dict[str, set[Key]] = {"send": set(), "receive": set()}
    at = [0] * len(schedules)
    moved = True
    while moved:
        moved = False
        for position, schedule in enumerate(schedules):
            while at[position] < len(schedule) and _ready(schedule[at[position]], done):
                at[position] += 1
                moved = True
    stuck = [position for position, schedule in enumerate(schedules) if at[position] < len(schedule)]
    if stuck:
        position = stuck[0]
        op = schedules[position][at[position]]
        sender, receiver, _, _ = lanes[op.target]
        other = receiver if sender == position else sender
        there = at[other] < len(schedules[other])
        problem = f"waits, and '{schedules[other][at[other]]}' waits, too," if there else "has no partner"
        raise staged_refusals.unheard(position, str(op), other, problem)


def _ready(op: Op, done: dict[str, set[Key]]) -> bool:
    """Run an op; tell whether it could."""
    key = op.target, op.microbatch
    if op.kind in done:
        done[op.kind].add(key)
    elif op.kind in ("wait send", "wait receive"):
        return key in done["send"] and key in done["receive"]
    return True


def _check_orders(schedules: Sequence[Schedule], lanes: Mapping[str, Lane]) -> None:
    """Compare the orders of sends and of receives on each lane."""
    for lane in dict.fromkeys(lanes.values()):
        pair = lane.sender, lane.receiver
        sent = [op for op in schedules[lane.sender] if op.kind == "send" and lanes[op.target] == lane]
        heard = [op for op in schedules[lane.receiver] if op.kind == "receive" and lanes[op.target] == lane]
        for one, other in zip(sent, heard, strict=False):
            if (one.target, one.microbatch) != (other.target, other.microbatch):
                raise staged_refusals.unheard(pair[0], str(one), pair[1], f"meets '{other}'")
        if len(sent) != len(heard):
            position, rest = (0, sent[len(heard)]) if len(sent) > len(heard) else (1, heard[len(sent)])
            raise staged_refusals.unheard(pair[position], str(rest), pair[1 - position], "has no partner")
