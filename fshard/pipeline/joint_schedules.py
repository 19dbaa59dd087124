"""The schedules of all positions of a pipeline, built and checked together."""

from collections.abc import Sequence, Set
from dataclasses import replace

from fshard.errors import ScheduleError
from fshard.patterns import glob_matches
from fshard.pipeline.check_joint import check_joint
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.rank_program import Lane, RankProgram, rank_program
from fshard.pipeline.staged_trace import StagedProgram
from fshard.schedule.build import build
from fshard.schedule.check import check
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Keep, Policy
from fshard.schedule.schedule import Schedule
from fshard.sharding.plan import Plan

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
