"""The steps of a model whose stages lie on different ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import bind
from fshard.errors import PlanError
from fshard.model.precision import Precision
from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.pipeline.check_order import check_order
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.order_csv import parse_csv
from fshard.pipeline.orders import PipelineOrder, parse
from fshard.pipeline.pipeline_runner import PipelineRunner
from fshard.pipeline.pipeline_trace import PipelineSchedules, PipelineTrace
from fshard.pipeline.staged_choice import orders_of
from fshard.pipeline.staged_task import StagedTask
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


class StagedRuns:
    """A step of a pipeline: the schedules of all positions."""

    _staged: PipelineRunner

    def trace(self, batch: Any) -> PipelineTrace:
        """Return what a step on batches like this one does, without running it. Needs no processes: any mesh will do.

        Raises:
            PlanError: the program cannot be cut into stages, or depends on values of tensors.
            BatchError: a step would refuse the batch: its rows cannot be cut into equal microbatches.
        """
        with bind(self._staged.plan.mesh, self._staged.plan.data_axes):
            return self._staged.trace(batch)

    @property
    def schedules(self) -> PipelineSchedules:
        """The schedules of all positions in the latest run. ``print`` them. ``schedule`` is that of this rank.

        Raises:
            PlanError: nothing has run yet.
        """
        latest = self._staged.latest_step
        if latest is None:
            raise PlanError(
                "no schedules yet: they are found from a batch; run it once, or ask trace, which runs nothing"
            )
        return latest.planned.schedules


class PipelineStep(StagedRuns, TrainStep):
    """A train step of which each rank runs its stages of the model."""

    def __init__(self, loss_fn: Callable[..., Any], opt: Optimizer, plan: Plan, options: Options) -> None:
        assert plan.stages is not None
        rule = contract(opt)
        order = functools.partial(order_of, plan.stages)
        if isinstance(options.running.policy, Policy):
            order(options.running.policy, options.accumulate)  # which refuses what these stages cannot run
        programs = programs_of(plan.own, options, rule)

        def infos(own: Plan) -> tuple[GroupInfo, ...]:
            state = state_needs(own, rule, options.clip.number, options.donate)
            return group_infos(own, state, secondary_of(programs.policy))

        runner = PipelineRunner(loss_fn, programs, order, infos, "train step")
        super().__init__(loss_fn, opt, plan.own, options, programs, runner)
        self._staged = runner

    def task(self, batch: Any) -> StagedTask:
        """Return what orders can be tried for, of batches like this one. Needs no processes.

        Raises:
            PlanError, BatchError: as ``trace``.
        """
        runner = self._staged
        with bind(runner.plan.mesh, runner.plan.data_axes):
            return runner.task(runner.cut_batch(batch)[0])

    def __repr__(self) -> str:
        whole = self.plan.whole
        assert whole is not None and whole.stages is not None
        return f"<train step of {len(whole.leaves)} leaves in {len(whole.stages.homes)} stages, {self.opt!r}>"


class PipelineEvalStep(StagedRuns, EvalStep):
    """An evaluation step of which each rank runs its stages of the model. All ranks return the result."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, running: RunOptions, precision: Precision | None) -> None:
        assert plan.stages is not None
        super().__init__(fn, plan.own, running, precision)
        secondary = secondary_of(running.policy)
        infos = functools.partial(group_infos, secondary=secondary)
        order = functools.partial(order_of, plan.stages, name=orders_of(plan.stages)[0])  # of which forwards are run
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


def secondary_of(policy: Policy | Auto) -> Axes:
    """The axes over which a policy keeps groups sharded between their uses."""
    return policy.secondary if isinstance(policy, Policy) else ()


def order_of(table: StageTable, policy: Policy, microbatches: int, name: str = "") -> PipelineOrder:
    """The order of a pipeline.

    Args:
        table: the stages.
        policy: names the order, or has its text.
        microbatches: of a step.
        name: of the order, in the place of the policy's.

    Raises:
        PlanError: the order is for stages that lie otherwise, or for another number of microbatches.
        ScheduleError: a text cannot be read, or ranks cannot run its order.
    """
    ranks = max(table.homes) + 1
    chunks = len(table.homes) // ranks
    folded = chunks > 1 and table.homes != tuple([stage % ranks for stage in range(len(table.homes))])
    name = name or policy.pipeline or ("1f1b" if chunks == 1 else "zbv" if folded else "interleaved")
    order = _read_order(name) if any(mark in name for mark in ",\n") else None
    if order is None:
        order = make_order(name, ranks, microbatches, chunks)
    elif order.microbatches != microbatches:
        raise PlanError(
            f"pipeline= is an order of {order.microbatches} microbatches, and the step has {microbatches}: give "
            f"accumulate={order.microbatches}"
        )
    if order.homes != table.homes:
        raise PlanError(
            f"pipeline={order.name!r} has its stages on the ranks {list(order.homes)}, and the plan on "
            f'{list(table.homes)}: give fs.Stages(axis, chunks=2, placement="v") for "zbv" and "dualpipev", '
            f'placement="loop" for the others'
        )
    return order


def _read_order(text: str) -> PipelineOrder:
    """An order that was given as text, of fshard or of PyTorch's CSV files."""
    order = parse(text) if text.lstrip().startswith("pipeline ") else parse_csv(text)
    check_order(order)
    return order
