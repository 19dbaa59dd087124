"""The loss and its gradients by plain PyTorch. Ranks take turns, so only one at a time holds all parameters."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.ranks import Ranks
from fshard.model.remat import exact
from fshard.proof.record import Output, PlainUnits, gap, tensors_of
from fshard.proof.report import Tolerance
from fshard.runtime.comm import Communicator, exchange, raise_failures
from fshard.runtime.comm.exchange import exchange_bytes
from fshard.runtime.engine.batch import microbatches
from fshard.runtime.engine.loss import check_differentiable, number, read_loss
from fshard.runtime.engine.rng import seeded
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
        communicator: the control communicator.
    """

    fn: Callable[..., Any]
    plan: Plan
    state: TrainState
    batch: Any
    accumulate: int
    divided: float
    outputs: list[Output]
    tolerance: Tolerance
    comm: Communicator


Difference = tuple[int, int, str, str]
"""The microbatch, the call and the unit of an output that differs, and the difference."""


@dataclass(frozen=True)
class PlainResult:
    """The results of plain PyTorch.

    Attributes:
        loss: the global mean loss.
        weighted: whether this rank's loss is an ``fs.Mean``.
        count: the elements of the global batch, or the parts.
        sums: this rank's part of the sums of gradients over the global batch, by group id.
        first: the first output on this rank that differs.
    """

    loss: float
    weighted: bool
    count: float
    sums: dict[int, Tensor]
    first: Difference | None


@dataclass(frozen=True)
class Pass:
    """The loss of this rank's batch: total, count and sums of gradients over microbatches, and what differs."""

    total: float = 0.0
    count: float = 0.0
    grads: dict[str, Tensor] = field(default_factory=dict)
    weighted: bool = False
    first: Difference | None = None


def run_plainly(task: Task) -> PlainResult:
    """Run the loss on whole parameters and the batches of all data ranks, one rank at a time. Collective.

    Raises:
        PeerError: the loss failed on another rank. On this rank its own error is raised.
    """
    plan, own, sums = task.plan, Pass(), dict[int, Tensor]()
    mine = plan.mesh.index(plan.data_axes)
    for turn in range(plan.data_size):
        leaves = _collect(plan, task.state, turn == mine)
        failure: Exception | None = None
        if turn == mine:
            try:
                own = _run(task, leaves)
            except Exception as error:
                failure = error
        raise_failures(task.comm, failure, "plain PyTorch failed, so nothing was verified:", REMEDY)
        del leaves
        _add(plan, own.grads if turn == mine else None, sums)
    row = torch.tensor([own.total, own.count], dtype=torch.float64, device="cpu")
    copies = plan.mesh.size // plan.data_size
    total, count = (exchange(task.comm, row).sum(0) / copies).tolist()
    return PlainResult(total / count if count else float("nan"), own.weighted, count, sums, own.first)


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


def _run(task: Task, leaves: dict[str, Tensor]) -> Pass:
    """Run the loss on this rank's batch."""
    trained = {path: leaf for path, leaf in leaves.items() if leaf.requires_grad}
    places, sums = task.plan.places(), dict[str, Tensor]()
    total, count, weighted = 0.0, 0.0, False
    first: Difference | None = None

    def hear(call: int, result: Any) -> None:
        nonlocal first
        first = first or _compared(task, call, tensors_of(result))

    units = PlainUnits(task.plan, hear)
    part = task.plan.mesh.index(task.plan.data_axes)
    torch.clear_autocast_cache()
    with seeded(task.state.seed, task.state.step, part, task.plan.mesh.device):
        for batch in microbatches(task.batch, task.accumulate):
            with units.heard(), exact():  # PyTorch's own derivatives of derivatives would not do as a reference
                loss = read_loss(task.fn(units.tree(leaves), batch))
            check_differentiable(loss)
            weighted = loss.count is not None
            total += number(loss.total)
            count += 1.0 if loss.count is None else number(loss.count)
            seed = torch.full_like(loss.total, 1.0 / task.divided)
            grads = torch.autograd.grad(loss.total, list(trained.values()), seed, allow_unused=True)
            for path, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    _add_up(sums, path, grad, places[path][0])
    if first is None and units.count != len(task.outputs):
        told = f"{len(task.outputs)} calls of units in the step, {units.count} in plain PyTorch"
        first = 0, units.count, "(the program)", told
    return Pass(total, count, sums, weighted, first)


def _add_up(sums: dict[str, Tensor], path: str, grad: Tensor, group: Group) -> None:
    rounded = grad.resolve_conj().to(group.reduce_dtype).to(group.dtype)
    sums[path] = sums[path] + rounded if path in sums else rounded


def _compared(task: Task, at: int, plain: tuple[Tensor, ...]) -> Difference | None:
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


def _add(plan: Plan, grads: dict[str, Tensor] | None, sums: dict[int, Tensor]) -> None:
    """Add one rank's gradients, which are None on other ranks, to each rank's part of the sums. Collective."""
    for group in plan.groups:
        if not group.trainable:
            continue
        owned = group.owned
        zeros = [torch.zeros(leaf.compute_shape, dtype=group.dtype, device=plan.mesh.device) for leaf in group.leaves]
        parts = [(grads or {}).get(leaf.path, zero) for leaf, zero in zip(group.leaves, zeros, strict=True)]
        full = join_leaves(owned, parts).to(torch.float64)
        ranks = Ranks(plan.mesh, plan.data_axes)
        whole = raw.sum_all(ranks, full)() if ranks.size > 1 else full
        begin = plan.mesh.index(owned.gather_axes) * owned.chunk
        own = whole[begin : begin + owned.chunk].clone()
        sums[group.id] = sums[group.id] + own if group.id in sums else own


def earliest(comm: Communicator, first: Difference | None) -> tuple[int, int, int, str, str] | None:
    """The first output that differs on any rank. Collective."""
    rows = exchange_bytes(comm, json.dumps(first).encode())
    found = [(row[0], row[1], number, row[2], row[3]) for number, row in enumerate(map(json.loads, rows)) if row]
    return min(found) if found else None
