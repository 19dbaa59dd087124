"""The task of choosing an order: a program that is cut into stages, and what each position needs under an order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard.pipeline.joint_schedules import joint_schedules
from fshard.pipeline.pipeline_runner import PipelineRunner, staged_communicators
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.pipeline.rank_program import RankProgram
from fshard.pipeline.stage_needs import StageNeeds, stage_needs
from fshard.pipeline.staged_trace import StagedProgram, trace_stages
from fshard.schedule.footprint import Footprint, footprint
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Policy
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


@dataclass(frozen=True)
class StagedTask:
    """A program of which orders are tried. It is traced once, and the stages of each position once or twice.

    Attributes:
        runner: of the step.
        part: a microbatch.
        staged: the program, cut into stages.
        known: by position the plan of what its ranks hold, and what schedules know of its groups.
    """

    runner: PipelineRunner
    part: Any
    staged: StagedProgram
    known: Sequence[tuple[Plan, Sequence[GroupInfo]]]
    measured: dict[tuple[int, bool], StageNeeds] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, runner: PipelineRunner, batch: Any) -> "StagedTask":
        """The task of a step and a batch.

        Raises:
            PlanError: the program cannot be cut into stages, or depends on values of tensors.
            BatchError: the batch cannot be cut into equal microbatches.
        """
        part, whole, programs = runner.cut_batch(batch)[0], runner.plan.whole, runner.programs
        assert whole is not None and whole.stages is not None
        staged = trace_stages(runner.finder.fn, whole, part, programs.train, programs.remat)
        return cls(runner, part, staged, runner.positions())

    def under(self, policy: Policy) -> tuple[PipelineSchedules, tuple[PositionForecast, ...]]:
        """The schedules of all positions with a policy, and what each position needs.

        Raises:
            PlanError, ScheduleError: the stages cannot run in that order.
        """
        programs = self.runner.programs
        order = self.runner.order(policy, programs.accumulate)
        ranks, schedules, lanes = joint_schedules(self.staged, self.known, order, policy, programs.train)
        found = []
        for position, (rank, schedule) in enumerate(zip(ranks, schedules, strict=True)):
            plan, parted = self.known[position][0], any(action.kind == "I" for action in order.ranks[position])
            if (position, parted) not in self.measured:
                given = self.runner.finder.fn, self.staged, rank, plan, self.part, programs.train, programs.remat
                self.measured[position, parted] = stage_needs(*given)
            needs = self.measured[position, parted]
            joined = staged_communicators(plan, position, lanes, policy.secondary, self.staged.trace.axes)
            held = footprint(schedule, needs.needs, programs.direct)
            found.append(PositionForecast(rank, needs, held, len(joined), needs.flops))
        return PipelineSchedules(order, tuple(schedules)), tuple(found)
