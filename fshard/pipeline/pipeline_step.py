"""The train step of a model whose stages lie on different ranks."""

import functools
from collections.abc import Callable
from typing import Any

from fshard.errors import PlanError
from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.pipeline_runner import PipelineRunner
from fshard.runtime.execution.update_memory import state_needs
from fshard.runtime.steps import Options
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable
from fshard.training.train_step import TrainStep, programs_of


class PipelineStep(TrainStep):
    """A train step of which each rank runs its stages of the model."""

    def __init__(self, loss_fn: Callable[..., Any], opt: Optimizer, plan: Plan, options: Options) -> None:
        rule = contract(opt)
        programs = programs_of(plan.own, options, rule)

        def infos(own: Plan) -> tuple[GroupInfo, ...]:
            state = state_needs(own, rule, options.clip.number, options.donate)
            return group_infos(own, state, programs.policy.secondary if isinstance(programs.policy, Policy) else ())

        runner = PipelineRunner(loss_fn, programs, functools.partial(order_of, plan.stages), infos)
        super().__init__(loss_fn, opt, plan.own, options, programs, runner)

    def __repr__(self) -> str:
        whole = self.plan.whole
        assert whole is not None and whole.stages is not None
        return f"<train step of {len(whole.leaves)} leaves in {len(whole.stages.homes)} stages, {self.opt!r}>"


def order_of(table: StageTable, policy: Policy, microbatches: int) -> PipelineOrder:
    """The order of a pipeline.

    Args:
        table: the stages.
        policy: names the order.
        microbatches: of a step.

    Raises:
        PlanError: the order is for stages that lie otherwise.
    """
    ranks = max(table.homes) + 1
    chunks = len(table.homes) // ranks
    name = policy.pipeline or ("1f1b" if chunks == 1 else "interleaved")
    order = make_order(name, ranks, microbatches, chunks)
    if order.homes != table.homes:
        raise PlanError(
            f"pipeline={name!r} has its stages on the ranks {list(order.homes)}, and the plan on {list(table.homes)}: "
            f'give fs.Stages(axis, chunks=2, placement="v") for "zbv" and "dualpipev", placement="loop" for the others'
        )
    return order
