"""The loss and its gradients by plain PyTorch. Ranks take turns, so only one at a time holds all parameters."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.group import Group as Ranks
from fshard.model.remat import exact
from fshard.proof.record import Output, PlainUnits, gap, tensors_of
from fshard.proof.report import Tolerance
from fshard.runtime.batch import microbatches
from fshard.runtime.comm import Lane, exchange, raise_failures
from fshard.runtime.comm.exchange import exchange_bytes
from fshard.runtime.loss import check_differentiable, number, read_loss
from fshard.runtime.rng import seeded
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan
from fshard.state.pack import cut_leaves, join_leaves
from fshard.state.train_state import TrainState

REMEDY = "The step computed a loss from the same batch. See whether the loss needs other ranks or a train step."


@dataclass(frozen=True)
class Task:
    """What to run.

    Attributes:
        fn: the loss function.
        plan: the plan.
        state: the parameters, the seed and the step.
        batch: this rank's batch.
        accumulate: the number of microbatches.
        divided: the divisor of gradients before they are summed, as in the step.
        outputs: the outputs of this rank's units in the step.
        tolerance: the largest differences of outputs that are allowed.
        lane: the control communicator.
    """

    fn: Callable[..., Any]
    plan: Plan
    state: TrainState
    batch: Any
    accumulate: int
    divided: float
    outputs: list[Output]
    tolerance: Tolerance
    lane: Lane


@dataclass
class PlainResult:
    """The results of plain PyTorch.

    Attributes:
        loss: the global mean loss.
        weighted: whether the loss is an ``fs.Mean``.
        count: the elements of the global batch, or the parts.
        sums: this rank's part of the sums of gradients over the global batch, by group id.
        first: the first output on this rank that differs: the microbatch, the call, the unit, and the difference.
    """

    loss: float = 0.0
    weighted: bool = False
    count: float = 0.0
    sums: dict[int, Tensor] = field(default_factory=dict)
    first: tuple[int, int, str, str] | None = None


def run_plainly(task: Task) -> PlainResult:
    """Run the loss on whole parameters and the batches of all data ranks, one rank at a time. Collective.

    Raises:
        PeerError: the loss failed on another rank. On this rank its own error is raised.
    """
    plan, found = task.plan, PlainResult()
    mine = plan.mesh.index(plan.data_axes)
    total = count = 0.0
    for turn in range(plan.data_size):
        leaves = _collect(plan, task.state, turn == mine)
        grads: dict[str, Tensor] = {}
        failure: Exception | None = None
        if turn == mine:
            try:
                total, count, grads = _pass(task, leaves, found)
            except Exception as error:
                failure = error
        raise_failures(task.lane, failure, "plain PyTorch failed, so nothing was verified:", REMEDY)
        del leaves
        _add(plan, grads, turn == mine, found)
    rows = exchange(task.lane, torch.tensor([total, count], dtype=torch.float64, device="cpu")).tolist()
    copies = plan.mesh.size // plan.data_size
    found.count = sum(row[1] for row in rows) / copies
    found.loss = sum(row[0] for row in rows) / copies / found.count if found.count else float("nan")
    return found


def _collect(plan: Plan, state: TrainState, keep: bool) -> dict[str, Tensor]:
    """The parameters as units read them, by path, gathered group by group; empty unless ``keep``. Collective."""
    out: dict[str, Tensor] = {}
    for group, shard in zip(plan.groups, state.finished(), strict=True):
        chunk = shard.param.detach().to(device=plan.mesh.device, dtype=group.compute_dtype)
        ranks = Ranks(plan.mesh, group.gather_axes)
        full = raw.gather(ranks, chunk)().reshape(-1) if ranks.size > 1 else chunk
        for leaf, tensor in zip(group.leaves, cut_leaves(group, full) if keep else (), strict=keep):
            copy = tensor.clone(memory_format=torch.contiguous_format)
            out[leaf.path] = copy.requires_grad_(leaf.trainable)
    return out


def _pass(task: Task, leaves: dict[str, Tensor], found: PlainResult) -> tuple[float, float, dict[str, Tensor]]:
    """The total, the count and the sums of gradients over the microbatches of this rank's batch."""
    trained = {path: leaf for path, leaf in leaves.items() if leaf.requires_grad}
    places, sums = task.plan.places(), dict[str, Tensor]()
    total, count, heard = 0.0, 0.0, 0
    part = task.plan.mesh.index(task.plan.data_axes)
    torch.clear_autocast_cache()
    with seeded(task.state.seed, task.state.step, part, task.plan.mesh.device):
        for batch in microbatches(task.batch, task.accumulate):
            at = heard

            def hear(call: int, result: Any, at: int = at) -> None:
                if found.first is None:
                    found.first = _compared(task, at + call, tensors_of(result))

            units = PlainUnits(task.plan, hear)
            with exact():  # PyTorch's own derivatives of derivatives would not do as a reference
                loss = read_loss(task.fn(units.tree(leaves), batch))
            check_differentiable(loss)
            units.over, heard = True, heard + units.count
            found.weighted = loss.count is not None
            total += number(loss.total)
            count += 1.0 if loss.count is None else number(loss.count)
            seed = torch.full_like(loss.total, 1.0 / task.divided)
            grads = torch.autograd.grad(loss.total, list(trained.values()), seed, allow_unused=True)
            for path, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    _add_up(sums, path, grad, places[path][0])
    if found.first is None and heard != len(task.outputs):
        told = f"{len(task.outputs)} calls of units in the step, {heard} in plain PyTorch"
        found.first = 0, heard, "(the program)", told
    return total, count, sums


def _add_up(sums: dict[str, Tensor], path: str, grad: Tensor, group: Group) -> None:
    rounded = grad.resolve_conj().to(group.reduce_dtype).to(group.dtype)
    sums[path] = sums[path] + rounded if path in sums else rounded


def _compared(task: Task, at: int, plain: tuple[Tensor, ...]) -> tuple[int, int, str, str] | None:
    """The difference of an output from that of the step; None if they are equal."""
    if at >= len(task.outputs):
        return 0, at, "(the program)", f"a call {at} of a unit that the step does not make"
    own = task.outputs[at]
    if len(own.tensors) != len(plain):
        told = f"{len(own.tensors)} tensors in the step, {len(plain)} in plain PyTorch"
        return own.microbatch, own.call, own.unit, told
    for place, (one, other) in enumerate(zip(own.tensors, plain, strict=True)):
        far, size = gap(one, other)
        limit = task.tolerance.limit(size, [one.dtype, other.dtype, *_read_in(task.plan, own.unit)])
        if far > limit:
            where = f"output {place} of shape {list(other.shape)} of call {own.call}, microbatch {own.microbatch},"
            return own.microbatch, own.call, own.unit, f"{where} differs by {far:.3g}; the largest in it is {size:.3g}"
    return None


def _read_in(plan: Plan, unit: str) -> list[torch.dtype]:
    """The dtypes in which a unit reads its parameters."""
    return [group.compute_dtype for group in plan.groups if group.unit == unit]


def _add(plan: Plan, grads: dict[str, Tensor], mine: bool, found: PlainResult) -> None:
    """Add one rank's gradients to each rank's part of the sums. Collective."""
    for group in plan.groups:
        if not group.trainable:
            continue
        owned = group.owned
        zeros = [torch.zeros(leaf.compute_shape, dtype=group.dtype, device=plan.mesh.device) for leaf in group.leaves]
        parts = [grads.get(leaf.path, zero) for leaf, zero in zip(group.leaves, zeros, strict=True)]
        full = join_leaves(owned, parts if mine else zeros).to(torch.float64)
        ranks = Ranks(plan.mesh, plan.data_axes)
        whole = raw.sum_all(ranks, full)() if ranks.size > 1 else full
        begin = plan.mesh.index(owned.gather_axes) * owned.chunk
        own = whole[begin : begin + owned.chunk].clone()
        found.sums[group.id] = found.sums[group.id] + own if group.id in found.sums else own


def earliest(lane: Lane, first: tuple[int, int, str, str] | None) -> tuple[int, int, int, str, str] | None:
    """The first output that differs on any rank. Collective."""
    rows = exchange_bytes(lane, json.dumps(first).encode())
    found = [(row[0], row[1], number, row[2], row[3]) for number, row in enumerate(map(json.loads, rows)) if row]
    return min(found) if found else None
