"""The forecast of a step whose stages lie on different ranks: orders, idle time, and memory by position."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fshard.errors import BatchError, PlanError, ScheduleError
from fshard.foresight.foresee import Progress, for_gpus, sizes, state_bytes
from fshard.foresight.hardware import Hardware
from fshard.foresight.jobs import Job
from fshard.optim.contract import contract
from fshard.pipeline.named_orders import fitting_orders
from fshard.pipeline.pipeline_simulation import PipelineSimulation, simulate_together
from fshard.pipeline.pipeline_step import PipelineStep
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.pipeline.staged_choice import orders_of, policies
from fshard.pipeline.staged_task import PositionForecast, StagedTask
from fshard.pipeline.stages import Stages
from fshard.runtime.execution.update_memory import update_needs
from fshard.schedule.costs import Costs
from fshard.schedule.policy import Policy
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

CUTS = ((1, "loop"), (2, "loop"), (2, "v"))
"""Chunks of a rank that are tried, and how they lie."""


@dataclass(frozen=True)
class StagedOption:
    """One order of the stages of a cut, and what a step takes with it.

    Attributes:
        stages: the cut.
        policy: its ``pipeline`` names the order.
        schedules: of all positions.
        simulation: a step.
        held: by position, the most bytes that a rank holds, with state and communicators.
        states: by position, the bytes of parameters and optimizer state in that.
    """

    stages: Stages
    policy: Policy
    schedules: PipelineSchedules = field(repr=False)
    simulation: PipelineSimulation = field(repr=False)
    held: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.simulation.seconds


@dataclass(frozen=True)
class StagedForesight:
    """The forecast of a step with stages before it runs.

    Attributes:
        mesh: all ranks.
        hardware: what it would run on.
        options: the orders, the fastest first.
        refused: the orders that cannot be, and why.
        microbatches: of a step.
        parameters: of the whole model.
        rows: rows of the batch of the ranks of one position on the other axes.
        tokens: its tokens; 0 if it has none.
        flops: operations of the model for that batch, at all positions.
        peak: operations a second of one device, to which MFU refers.
        replicas: how many such batches a step takes.
        words: what the model and its batch are.
    """

    mesh: Mesh
    hardware: Hardware
    options: Sequence[StagedOption]
    refused: Mapping[str, str]
    microbatches: int
    parameters: int
    rows: int
    tokens: int
    flops: int
    peak: float
    replicas: int
    words: str = ""

    @property
    def chosen(self) -> StagedOption:
        """The fastest option that fits; of all, if none does, the one that holds least."""
        fits = [each for each in self.options if self.fit(each)]
        return fits[0] if fits else min(self.options, key=lambda each: max(each.held))

    @property
    def fits(self) -> bool:
        """Tell whether an option fits into the memory of a device."""
        return self.fit(self.chosen)

    def fit(self, option: StagedOption) -> bool:
        """Tell whether an option fits into the memory of a device."""
        return self.hardware.memory is None or max(option.held) <= self.hardware.memory

    def mfu(self, option: StagedOption) -> float:
        """Operations of the model to those that the devices of all positions could do in the time of a step."""
        return self.flops / (option.seconds * self.peak * len(option.held))


def foresee_stages(
    job: Job | tuple[PipelineStep, Any], mesh: Mesh, hardware: Hardware, progress: Progress = lambda what, part: None
) -> StagedForesight:
    """Return what a step with stages would hold, send and take, by order.

    Args:
        job: with ``stages``: a cut of one chunk tries the orders of more chunks, too. Of a step and a batch, the orders
            are those that its policy leaves open.
        mesh: all ranks.
        hardware: what it would run on, without measured costs.
        progress: is told how far it is.

    Raises:
        PlanError: no order can be; the hardware has measured costs, which are those of a program without stages.
    """
    if hardware.costs is not None:
        raise PlanError("--costs are of a step without stages: leave them out, or leave the axis of stages out")
    options, refused, facts = list[StagedOption](), dict[str, Exception](), None
    cuts = [*_cuts(job, mesh)]
    for number, cut in enumerate(cuts):
        progress(f"stages, {cut.stages.chunks} on a rank", number / len(cuts))
        try:
            step, batch = cut.make()
            task = step.task(batch)
        except (PlanError, BatchError) as error:
            refused |= dict[str, Exception].fromkeys([policy.pipeline for policy in cut.policies], error)
            continue
        for policy in cut.policies:
            try:
                option, flops = _option(task, step, cut.stages, policy, hardware)
            except (PlanError, ScheduleError) as error:
                refused[policy.pipeline] = error
                continue
            options.append(option)
            facts = facts or (step, batch, flops)
    if facts is None:
        raise next(iter(refused.values()))  # of the simplest cut
    return _seen(mesh, hardware, options, refused, *facts, getattr(job, "words", ""))


def _seen(
    mesh: Mesh,
    hardware: Hardware,
    options: list[StagedOption],
    refused: Mapping[str, Exception],
    step: PipelineStep,
    batch: Any,
    flops: int,
    words: str,
) -> StagedForesight:
    """The forecast, of what each order came to, and of a step and a batch."""
    plan = step.plan.whole
    assert plan is not None
    options.sort(key=lambda each: (each.seconds, max(each.held)))
    count = sum(leaf.numel for leaf in plan.leaves.values())
    possible = {each.policy.pipeline for each in options}
    told = {name: " ".join(f"{why}".split()) for name, why in refused.items() if name not in possible}
    peak, known = hardware.speed_for(plan).peak, replace(hardware, words=hardware.words_for(plan))
    numbers = step.programs.accumulate, count, *sizes(batch), flops, peak, plan.data_size
    return StagedForesight(mesh, known, options, told, *numbers, words)


class _Cut(NamedTuple):
    """A cut that is tried: its stages, its policies, and what makes a step and a batch."""

    stages: Stages
    policies: list[Policy]
    make: Callable[[], tuple[PipelineStep, Any]]


def _cuts(job: Job | tuple[PipelineStep, Any], mesh: Mesh) -> Iterator[_Cut]:
    """The cuts that are tried, and the policies of each."""
    if not isinstance(job, Job):
        whole, found = job[0].plan.whole, job[0].programs.policy
        assert whole is not None and whole.stages is not None and whole.source is not None
        cut, orders = whole.source.stages, orders_of(whole.stages)
        assert isinstance(cut, Stages)
        yield _Cut(cut, [found] if isinstance(found, Policy) else [*policies(orders, found.update)], lambda: job)
        return
    given = job.stages
    assert given is not None
    free = given.cut == "balanced" and given.chunks == 1
    for chunks, placement in CUTS if free else [(given.chunks, given.placement)]:
        stages = replace(given, chunks=chunks, placement=placement)
        yield _Cut(stages, [*policies(fitting_orders(chunks, placement))], functools.partial(_made, job, stages, mesh))


def _made(job: Job, stages: Stages, mesh: Mesh) -> tuple[PipelineStep, Any]:
    """The step of a job with these stages, and a batch."""
    step, batch = replace(job, stages=stages).step(mesh)
    assert isinstance(step, PipelineStep)
    return step, batch


def _option(
    task: StagedTask, step: PipelineStep, stages: Stages, policy: Policy, hardware: Hardware
) -> tuple[StagedOption, int]:
    """One policy, and the operations of the model for a batch."""
    schedules, found = task.under(policy)
    plans = [for_gpus(plan) for plan, _ in task.known]
    whole = step.plan.whole
    assert whole is not None
    links = hardware.cluster.links(whole.mesh)
    each = [_costs(one, plan, step, hardware, links) for one, plan in zip(found, plans, strict=True)]
    costs = Costs(
        {op: took for one in each for op, took in one.seconds.items()},
        links=links,
        copies={op: took for one in each for op, took in one.copies.items()},
        host=max(one.host for one in each),
    )
    states = [state_bytes(step, plan) for plan in plans]
    held = [
        state + one.footprint.peak_bytes + one.communicators * hardware.communicator
        for state, one in zip(states, found, strict=True)
    ]
    simulation = simulate_together(schedules.ranks, costs.only({op.kind for one in schedules.ranks for op in one}))
    flops = sum(one.flops for one in found) * task.programs.accumulate
    return StagedOption(stages, policy, schedules, simulation, tuple(held), tuple(states)), flops


def _costs(found: PositionForecast, plan: Plan, step: PipelineStep, hardware: Hardware, links: Any) -> Costs:
    """Costs of the ops of one position."""
    updates = {plan.groups[number].name: need for number, need in update_needs(plan, contract(step.opt)).items()}
    return hardware.of_program(found.program.step, found.needs.needs, updates, plan, links)
