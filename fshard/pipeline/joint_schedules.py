"""The schedules of all positions of a pipeline, built, and checked together: no rank waits for good.

Each schedule was checked alone. Here they run side by side on nothing but the rules of messages: a message arrives when
it was sent and its receive was posted, and messages on one lane come in one order on both sides.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from fshard.errors import ScheduleError
from fshard.patterns import glob_matches
from fshard.pipeline import staged_refusals
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.rank_program import Lane, RankProgram, rank_program
from fshard.pipeline.staged_trace import StagedProgram
from fshard.schedule.build import build
from fshard.schedule.check import check
from fshard.schedule.ops import GroupInfo, Op
from fshard.schedule.policy import Keep, Policy
from fshard.schedule.schedule import Schedule
from fshard.sharding.plan import Plan

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


Joint = tuple[list[RankProgram], list[Schedule], list[Lane]]
"""The programs and the schedules of all positions, and the lanes between their stages."""


def joint_schedules(
    staged: StagedProgram,
    plans: Sequence[tuple[Plan, Sequence[GroupInfo]]],
    order: PipelineOrder,
    policy: Policy,
    train: bool,
) -> Joint:
    """Build the schedules of all positions.

    One message at a time is under way on an edge, if all ranks can run then. A value that skips over stages may have to
    wait for its receiver while this rank goes on: then there are two, or four, up to one for each microbatch.

    Args:
        staged: the program, cut into stages.
        plans: by position the plan of what its ranks hold, and what schedules know of its groups.
        order: the order of the pipeline.
        policy: how schedules are built.
        train: whether there are gradients.

    Raises:
        ScheduleError: no such schedules fit together.
    """
    most = 1
    while True:
        programs = [
            rank_program(staged, plan, infos, order, position, train, most)
            for position, (plan, infos) in enumerate(plans)
        ]
        units = [{call.unit for call in one.program.forward} for one in programs]
        policies = [policy_of(policy, own, set.union(*units)) for own in units]
        pairs = zip(programs, policies, strict=True)
        schedules = [build(one.step, one.infos, its, 1, train) for one, its in pairs]
        lanes = {name: kind.lane for one in programs for name, kind in one.messages.items()}
        for schedule in schedules:
            check(schedule)
        try:
            check_joint(schedules, lanes)
        except ScheduleError:
            if most >= order.microbatches:
                raise
            most = min(2 * most, order.microbatches)
        else:
            return programs, schedules, sorted(set(lanes.values()))


def policy_of(policy: Policy, own: Set[str], called: Set[str]) -> Policy:
    """The policy of a position: of the units that ``fs.keep`` names, those that are called there.

    Args:
        policy: that of the step.
        own: the units that are called at the position.
        called: those of all positions.

    >>> from fshard.schedule.policy import keep
    >>> policy_of(Policy(reshard=keep("a", "b")), {"b"}, {"a", "b"}).reshard
    Keep(units=('b',), last=0)
    """
    kept = policy.reshard
    if not isinstance(kept, Keep):
        return policy
    elsewhere = [
        pattern
        for pattern in kept.units
        if not any(glob_matches(pattern, unit) for unit in own) and any(glob_matches(pattern, unit) for unit in called)
    ]
    left = tuple([pattern for pattern in kept.units if pattern not in elsewhere])
    return replace(policy, reshard=replace(kept, units=left) if left or kept.last else True)
