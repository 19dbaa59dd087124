"""The steps of a model whose stages lie on different ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import PlanError
from fshard.model.precision import Precision
from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.pipeline_runner import PipelineRunner
from fshard.runtime.engine.loss_result import Mean
from fshard.runtime.engine.plain_values import is_float
from fshard.runtime.execution.update_memory import state_needs
from fshard.runtime.steps import Options, StepRequest
from fshard.runtime.steps.step_options import RunOptions
from fshard.schedule.auto import Auto
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import GroupInfo
from fshard.schedule.policy import Policy
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable
from fshard.state.equal import Equal
from fshard.training.evaluate import EvalStep
from fshard.training.train_step import TrainStep, programs_of


class PipelineStep(TrainStep):
    """A train step of which each rank runs its stages of the model."""

    def __init__(self, loss_fn: Callable[..., Any], opt: Optimizer, plan: Plan, options: Options) -> None:
        assert plan.stages is not None
        rule = contract(opt)
        programs = programs_of(plan.own, options, rule)
        check_policy(programs.policy)

        def infos(own: Plan) -> tuple[GroupInfo, ...]:
            state = state_needs(own, rule, options.clip.number, options.donate)
            return group_infos(own, state, secondary_of(programs.policy))

        runner = PipelineRunner(loss_fn, programs, functools.partial(order_of, plan.stages), infos, "train step")
        super().__init__(loss_fn, opt, plan.own, options, programs, runner)

    def __repr__(self) -> str:
        whole = self.plan.whole
        assert whole is not None and whole.stages is not None
        return f"<train step of {len(whole.leaves)} leaves in {len(whole.stages.homes)} stages, {self.opt!r}>"


class PipelineEvalStep(EvalStep):
    """An evaluation step of which each rank runs its stages of the model. All ranks return the result."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, running: RunOptions, precision: Precision | None) -> None:
        assert plan.stages is not None
        check_policy(running.policy)
        super().__init__(fn, plan.own, running, precision)
        secondary = secondary_of(running.policy)
        infos = functools.partial(group_infos, secondary=secondary)
        order = functools.partial(order_of, plan.stages, name="gpipe")
        self._runner = self._staged = PipelineRunner(fn, self._programs(), order, infos, "evaluation step")
        self._equal = Equal(plan, running.told(), always=running.debug)

    def _evaluate(self, request: StepRequest) -> Any:
        result = super()._evaluate(request)
        step, whole = self._staged.latest_step, self.plan.whole
        assert step is not None and whole is not None and whole.stages is not None
        told, spec = tree.flatten(step.staged.result)
        last = step.rank.stages[-1] + 1 == len(step.staged.last)
        ranks, home = Ranks(whole.mesh, (whole.stages.axis,)), whole.stages.homes[-1]
        mine = tree.leaves(result) if last else told
        means = iter(() if last else tree.leaves(result))
        out = []
        for leaf, like in zip(mine, told, strict=True):
            if isinstance(like, Mean) or is_float(like):
                out.append(leaf if last else next(means))
            elif isinstance(like, Tensor):
                row = leaf if last else torch.zeros(like.shape, dtype=like.dtype, device=self.plan.mesh.device)
                rows = apply(row.reshape(-1), Collect(ranks, -1))
                out.append(rows.view(ranks.size, -1)[home].view(like.shape))
            else:
                out.append(leaf)
        return tree.unflatten(spec, out)


def check_policy(policy: Policy | Auto) -> None:
    """Refuse a policy that stages do not have.

    Raises:
        PlanError: schedules are to be chosen.
    """
    if isinstance(policy, Auto):
        raise PlanError(
            'schedule="auto" does not choose schedules of stages yet: give schedule=fs.Policy(pipeline="1f1b")'
        )


def secondary_of(policy: Policy | Auto) -> Axes:
    """The axes over which a policy keeps groups sharded between their uses."""
    return policy.secondary if isinstance(policy, Policy) else ()


def order_of(table: StageTable, policy: Policy, microbatches: int, name: str = "") -> PipelineOrder:
    """The order of a pipeline.

    Args:
        table: the stages.
        policy: names the order.
        microbatches: of a step.
        name: of the order, in the place of the policy's.

    Raises:
        PlanError: the order is for stages that lie otherwise.
    """
    ranks = max(table.homes) + 1
    chunks = len(table.homes) // ranks
    name = name or policy.pipeline or ("1f1b" if chunks == 1 else "interleaved")
    order = make_order(name, ranks, microbatches, chunks)
    if order.homes != table.homes:
        raise PlanError(
            f"pipeline={name!r} has its stages on the ranks {list(order.homes)}, and the plan on {list(table.homes)}: "
            f'give fs.Stages(axis, chunks=2, placement="v") for "zbv" and "dualpipev", placement="loop" for the others'
        )
    return order
