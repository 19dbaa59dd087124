"""The task of choosing an order: a program that is cut into stages, and what each position needs under an order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard.pipeline.joint_schedules import joint_schedules
from fshard.pipeline.mail import ROLE as MAIL
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.pipeline.rank_program import Lane, RankProgram
from fshard.pipeline.stage_needs import StageNeeds, stage_needs
from fshard.pipeline.stage_sums import role_of, shared_by
from fshard.pipeline.staged_trace import StagedProgram
from fshard.runtime.steps.programs import Programs
from fshard.schedule.footprint import Footprint, footprint
from fshard.schedule.infos import communicators
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Policy
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class PositionForecast:
    """The forecast of the ranks of one position under an order.

    Attributes:
        program: what they do.
        needs: what their compute ops need.
        footprint: what they hold at the peak of a step, beside their state.
        communicators: how many they have.
        flops: operations of the model for one microbatch.
    """

    program: RankProgram
    needs: StageNeeds
    footprint: Footprint
    communicators: int
    flops: int


OrderMaker = Callable[[Policy, int], PipelineOrder]
"""Gives the order of a pipeline, of a policy and the number of microbatches."""


@dataclass(frozen=True)
class StagedTask:
    """A program of which orders are tried. It is traced once, and the stages of each position once or twice.

    Attributes:
        fn: the loss function, or for evaluation any function.
        programs: how it runs.
        order: gives the order of a policy.
        part: a microbatch.
        staged: the program, cut into stages.
        known: by position the plan of what its ranks hold, and what schedules know of its groups.
        position: that of this rank.
    """

    fn: Callable[..., Any]
    programs: Programs
    order: OrderMaker
    part: Any
    staged: StagedProgram
    known: Sequence[tuple[Plan, Sequence[GroupInfo]]]
    position: int
    measured: dict[tuple[int, bool], StageNeeds] = field(default_factory=dict, repr=False)

    def under(self, policy: Policy) -> tuple[PipelineSchedules, tuple[PositionForecast, ...]]:
        """The schedules of all positions with a policy, and what each position needs.

        Raises:
            PlanError, ScheduleError: the stages cannot run in that order.
        """
        programs = self.programs
        order = self.order(policy, programs.accumulate)
        ranks, schedules, lanes = joint_schedules(self.staged, self.known, order, policy, programs.train)
        found = []
        for position, (rank, schedule) in enumerate(zip(ranks, schedules, strict=True)):
            plan, parted = self.known[position][0], any(action.kind == "I" for action in order.ranks[position])
            if (position, parted) not in self.measured:
                given = self.fn, self.staged, rank, plan, self.part, programs.train, programs.remat
                self.measured[position, parted] = stage_needs(*given)
            needs = self.measured[position, parted]
            joined = staged_communicators(plan, position, lanes, policy.secondary, self.staged.trace.axes)
            held = footprint(schedule, needs.needs, programs.direct)
            found.append(PositionForecast(rank, needs, held, len(joined), needs.flops))
        return PipelineSchedules(order, tuple(schedules)), tuple(found)


def staged_communicators(
    plan: Plan, position: int, lanes: Sequence[Lane], secondary: Axes, axes: Sequence[Axes]
) -> tuple[tuple[str, Axes], ...]:
    """The communicators of a rank of a pipeline, by role and axes.

    Args:
        plan: of what the rank holds.
        position: its position on the axis of stages.
        lanes: the ways of messages between stages.
        secondary: the axes over which groups stay sharded between their uses.
        axes: those of the collectives that the program itself calls.
    """
    whole = plan.whole
    assert whole is not None and whole.stages is not None
    axis = (whole.stages.axis,)
    needed = communicators(plan, secondary, axes)
    needed += [(f"{MAIL} {lane}", axis) for lane in lanes if position in lane[:2]]
    needed += [(role, axis) for held in shared_by(whole) if position in held for role in [role_of(held)]]
    return tuple(needed)
