"""The forecast of a step on a mesh that need not exist: what it would hold, send and take."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.errors import PlanError
from fshard.foresight.hardware import Hardware
from fshard.foresight.jobs import GPU
from fshard.optim.contract import Contract, contract
from fshard.runtime.execution.trace_program import on_device
from fshard.runtime.execution.update_memory import state_needs, update_needs
from fshard.runtime.memory.optimizer_layout import beside_bytes, shard_bytes
from fshard.schedule.auto import Candidate, tried
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask, candidates
from fshard.schedule.footprint import Need
from fshard.schedule.infos import between, communicators, fast_axes, group_infos
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation, simulate
from fshard.schedule.step_trace import Trace
from fshard.schedule.transfers import HOST
from fshard.sharding.mesh import Axes, Mesh, abstract_mesh
from fshard.sharding.plan import Plan, plan_of
from fshard.sharding.spec import axes_of
from fshard.training.train_step import TrainStep

Progress = Callable[[str, float], object]
"""Told what is under way, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True)
class GroupRow:
    """One group of a plan: its leaves and parameters, and bytes on one rank."""

    name: str
    leaves: int
    parameters: int
    gathered: int
    state: int
    sent: int


@dataclass(frozen=True)
class Foresight:
    """The forecast of a step before it runs. All bytes are those of one rank.

    Attributes:
        plan: where the leaves are.
        hardware: what it would run on.
        groups: what the plan says of each group.
        state_bytes: parameter shards and optimizer state on the device.
        candidates: the policies, the fastest first.
        chosen: the fastest of those that fit; of all, if none does.
        simulation: a step with that policy.
        rows: rows of a rank's batch.
        tokens: tokens of a rank's batch; 0 if it has none.
        flops: operations of the model for a rank's batch, without those of recomputation.
        scaling: seconds of a step by the number of ranks, with as large a batch a rank.
        task: what policies were tried for.
        words: what the model and its batch are, where the user did not write them.
        host_bytes: parameter shards, optimizer state, gradients and activations in host memory.
    """

    plan: Plan
    hardware: Hardware
    groups: Sequence[GroupRow]
    state_bytes: int
    candidates: Sequence[Candidate]
    chosen: Candidate
    simulation: Simulation = field(repr=False)
    rows: int
    tokens: int
    flops: int
    scaling: Mapping[int, float]
    task: PolicyTask = field(repr=False)
    words: str = ""
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that a rank holds in a step."""
        return self.held(self.chosen)

    def held(self, tried: Candidate) -> int:
        """The most that a rank holds in a step with a policy: state, communicators and footprint."""
        return self.state_bytes + self.hardware.held(self.plan, tried, self.task)

    @property
    def communicators(self) -> list[tuple[str, Axes]]:
        """Return what a step with the chosen policy communicates on, by role and axes."""
        needed = communicators(self.plan, self.chosen.policy.secondary, self.task.axes)
        return [*needed, *between(self.task.groups)]

    @property
    def fits(self) -> bool:
        """Tell whether the step fits into the memory of a device."""
        return self.hardware.memory is None or self.peak_bytes <= self.hardware.memory

    @property
    def least(self) -> Candidate:
        """The policy that holds least."""
        return min(self.candidates, key=lambda each: (self.held(each), each.seconds))

    @property
    def schedule(self) -> Schedule:
        """That of the chosen policy."""
        return self.simulation.schedule

    @property
    def mfu(self) -> float:
        """Operations of the model to those that the device could do in the time of a step."""
        seconds = self.simulation.seconds
        return self.flops / (seconds * self.hardware.speed_for(self.plan).peak) if seconds else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks a second."""
        return self.tokens * self.plan.data_size / self.simulation.seconds if self.simulation.seconds else math.nan


def foresee(
    step: TrainStep,
    batch: Any,
    hardware: Hardware,
    progress: Progress = lambda what, part: None,
    task: PolicyTask | None = None,
) -> Foresight:
    """Return what a step would hold, send and take.

    Args:
        step: a train step whose plan is on any mesh.
        batch: a rank's batch; its values do not matter.
        hardware: what it would run on.
        progress: is told how far it is.
        task: what policies are tried for, if a search knows the program already; else it is traced.

    Raises:
        PlanError: the program depends on values of tensors.
    """
    progress("the program, on tensors without data", 0.0)
    plan = for_gpus(step.plan)
    task = task_of(step, step.trace(batch), plan) if task is None else task
    costs = hardware.of(task, plan)
    every = [*candidates(task, "deferred")]
    made: list[tuple[Candidate, Schedule]] = []
    for number, policy in enumerate(every):
        progress("policies", number / len(every))
        made.append(tried(task, policy, costs))
    state = state_bytes(step, plan)
    limit = math.inf if hardware.memory is None else hardware.memory - state
    held = functools.partial(hardware.held, plan, task=task)
    fits = [pair for pair in made if held(pair[0]) <= limit] or made
    chosen, schedule = min(fits, key=lambda pair: (pair[0].seconds, held(pair[0])))
    order = sorted((each for each, _ in made), key=lambda each: (each.seconds, held(each)))
    kinds = {op.kind for op in schedule}
    progress("numbers of ranks", 0.9)
    rows, tokens = sizes(batch)
    return Foresight(
        plan,
        hardware,
        group_rows(step, plan, schedule),
        state,
        order,
        chosen,
        simulate(schedule, costs.only(kinds)),
        rows,
        tokens,
        task.flops * task.accumulate,
        dict(scaling(task, plan, hardware, chosen.policy, contract(step.opt))),
        task,
        host_bytes=host_bytes(step, plan) + chosen.memory.host_bytes,
    )


def for_gpus(plan: Plan) -> Plan:
    """The same plan for GPUs, whose collectives need less staging: devices that are foreseen are GPUs."""
    return on_device(plan, GPU)


def task_of(step: TrainStep, found: Trace, plan: Plan) -> PolicyTask:
    """Return what policies are tried for."""
    if not found.needs:
        raise PlanError("a run has found this program, which depends on values of tensors: it cannot be foreseen")
    schedule, accumulate = found.schedule, step.options.accumulate
    bare = PolicyTask(schedule.program, schedule.groups, found.needs, accumulate, axes=found.program_axes)
    return on_plan(replace(bare, graphs=found.graphs, flops=found.flops or 0), plan, step)


def on_plan(task: PolicyTask, plan: Plan, step: TrainStep) -> PolicyTask:
    """The task on the groups of another plan of the same leaves, with the optimizer of a step."""
    state = state_needs(plan, contract(step.opt), step.options.clip.number, step.options.donate)
    beside = tuple(task.groups[len(plan.groups) :])  # these travel between steps
    axes = fast_axes(plan)
    second = {axes: (*group_infos(plan, state, axes), *beside)} if axes else {}
    full = all(group.reduce_dtype == group.dtype for group in plan.groups)
    groups = (*group_infos(plan, state), *beside)
    return replace(task, groups=groups, second=second, full=full, updates=_by_name(plan, state.work))


def _by_name(plan: Plan, work: Mapping[int, Need]) -> dict[str, Need]:
    """Return what the updates of a plan's groups need, by their names."""
    return {plan.groups[number].name: need for number, need in work.items()}


def state_bytes(step: TrainStep, plan: Plan) -> int:
    """Bytes of parameter shards and optimizer state on a rank's device."""
    return _state(step, plan)[0]


def host_bytes(step: TrainStep, plan: Plan) -> int:
    """Bytes of parameter shards, optimizer state and gradients that a rank keeps in host memory."""
    offloads = [move for info in group_infos(plan) for move in info.transfers if move.target == HOST]
    return _state(step, plan)[1] + sum(move.sent for move in offloads)


def _state(step: TrainStep, plan: Plan) -> tuple[int, int]:
    """Bytes of parameter shards and optimizer state on the device, and in host memory."""
    rule, held = contract(step.opt), [0, 0]
    for group in plan.groups:
        held[group.kinds.param != "device"] += shard_bytes(group)
        held[group.kinds.opt != "device"] += beside_bytes(group, plan.mesh, rule)
    return held[0], held[1]


def group_rows(step: TrainStep, plan: Plan, schedule: Schedule) -> list[GroupRow]:
    """Return what the plan says of each group."""
    rule, rows = contract(step.opt), []
    sent = {group.name: 0 for group in plan.groups}
    moves = {(move.kind, info.name): move.sent for info in schedule.groups for move in info.transfers if move.row.link}
    for op in schedule:
        sent[op.target] = sent.get(op.target, 0) + moves.get((op.kind, op.target), 0)
    for group, info in zip(plan.groups, schedule.groups, strict=False):  # behind these, some travel between steps
        state = shard_bytes(group)
        state += beside_bytes(group, plan.mesh, rule)
        count = sum(math.prod(leaf.shape) for leaf in group.leaves)
        rows.append(GroupRow(group.name, len(group.leaves), count, info.full_bytes, state, sent[group.name]))
    return rows


def sizes(batch: Any) -> tuple[int, int]:
    """The rows of a batch, and its tokens: elements of its first tensor of integers with two dims."""
    tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and x.dim()]
    words = next((x for x in tensors if x.dim() == 2 and not x.dtype.is_floating_point), None)
    return (tensors[0].shape[0] if tensors else 0), (words.numel() if words is not None else 0)


def row_parts(plan: Plan) -> tuple[int, int]:
    """Into how many parts the rows of a global batch are cut, and how many ranks with other data share each row."""
    first = plan.mesh.axis_size(axes_of(plan.batch.dims[0])) if plan.batch.dims else 1
    return first, plan.data_size // first


def scalable(plan: Plan) -> list[str]:
    """The mesh axes that may have more or fewer ranks with the same program on each: no compute is cut along them."""
    cut = {axis for leaf in plan.leaves.values() for axis in leaf.compute.axes}
    return [axis for axis in plan.mesh.axis_names if axis in plan.batch.axes and axis not in cut]


def resized(plan: Plan, axis: str, size: int) -> Mesh:
    """The mesh with so many ranks along an axis."""
    sizes = [size if name == axis else whole for name, whole in plan.mesh.shape.items()]
    return abstract_mesh(sizes, plan.mesh.axis_names, device=GPU)


def scaling(
    task: PolicyTask, plan: Plan, hardware: Hardware, policy: Policy, opt: Contract
) -> Iterator[tuple[int, float]]:
    """Seconds of a step with fewer ranks along the first data axis, and as large batches each. None of outer steps."""
    if plan.source is None:
        return
    axis = next(iter(scalable(plan)), None)
    whole = plan.mesh.shape[axis] if axis else 1
    parts = sorted({max(whole >> shift, 1) for shift in range(whole.bit_length())})
    for size in parts[-8:]:
        mesh = resized(plan, axis, size) if axis else plan.mesh
        smaller = plan_of(plan.source, mesh, plan.batch, plan.precision)
        groups = group_infos(smaller, secondary=policy.secondary)
        schedule = build(task.program, groups, policy, task.accumulate)
        updates = _by_name(smaller, update_needs(smaller, opt))
        costs = hardware.of(replace(task, updates=updates), smaller).only({op.kind for op in schedule})
        yield mesh.size, simulate(schedule, costs).seconds
