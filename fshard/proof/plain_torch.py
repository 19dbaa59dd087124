"""The loss and its gradients by plain PyTorch. Ranks take turns, so only one at a time holds all parameters."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives import raw
from fshard.collectives.ranks import Ranks
from fshard.model.remat_function import exact
from fshard.model.unit import Slot, Unit, attach
from fshard.proof.verification import Difference, Tolerance
from fshard.proof.watched_step import Output, tensors_of
from fshard.runtime.comm import Communicator, exchange, exchange_bytes, raise_failures
from fshard.runtime.comm.packing import rounded
from fshard.runtime.engine import check_differentiable, microbatches, number, read_loss, seeded
from fshard.runtime.graphs.graph_proof import gap
from fshard.runtime.memory import values_of
from fshard.sharding.layout import Group
from fshard.sharding.leaf import casting_of
from fshard.sharding.plan import Plan
from fshard.state.flat_maps import cut_leaves, join_leaves
from fshard.state.train_state import TrainState
from fshard.torch_internals import peek_interpreter_stack

REMEDY = "The step computed a loss from the same batch. See whether the loss needs other ranks or a train step."


@dataclass(frozen=True)
class ProofTask:
    """A run to make: the loss function on a state and this rank's batch, and the step's outputs to compare with."""

    fn: Callable[..., Any]
    plan: Plan
    state: TrainState
    batch: Any
    accumulate: int
    divided: float  # the divisor of gradients before they are summed
    outputs: list[Output]
    tolerance: Tolerance
    comm: Communicator


@dataclass(frozen=True)
class PlainResult:
    """The global mean loss and this rank's part of the sums of gradients, by group id, in plain PyTorch."""

    loss: float
    weighted: bool  # whether this rank's loss is an ``fs.Mean``
    count: float  # the elements of the global batch, or the parts
    sums: dict[int, Tensor]
    first: Difference | None  # the first output on this rank that differs


@dataclass(frozen=True)
class PlainPass:
    """The loss of this rank's batch: total, count and sums of gradients over microbatches, and what differs."""

    total: float = 0.0
    count: float = 0.0
    grads: dict[str, Tensor] = field(default_factory=dict)
    weighted: bool = False
    first: Difference | None = None


def run_plainly(task: ProofTask) -> PlainResult:
    """Run the loss on whole parameters and the batches of all data ranks, one rank at a time. Collective.

    Raises:
        PeerError: the loss failed on another rank. On this rank its own error is raised.
    """
    plan, own, sums = task.plan, PlainPass(), dict[int, Tensor]()
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
        chunk = _read(group, shard.param.detach().to(plan.mesh.device))
        ranks = Ranks(plan.mesh, group.gather_axes)
        full = raw.gather(ranks, chunk)().reshape(-1) if ranks.size > 1 else chunk
        for leaf, tensor in zip(group.leaves, cut_leaves(group, full) if keep else (), strict=keep):
            copy = tensor.clone(memory_format=torch.contiguous_format)
            out[leaf.path] = copy.requires_grad_(leaf.trainable)
    return out


def _read(group: Group, shard: Tensor) -> Tensor:
    """A shard in the dtype of compute, as it arrives from its rank."""
    form = group.wires.get("all_gather")
    if form is None or group.packed is not None or group.row:  # the product rounds its rows
        return values_of(group, shard, group.compute_dtype).to(group.compute_dtype)
    out = shard.new_empty(shard.shape, dtype=group.compute_dtype)
    rounded(shard, form, out)
    return out


def _reduced(group: Group, grad: Tensor) -> Tensor:
    """A gradient as it is sent to be summed. The last block of a leaf ends with zeros."""
    form = group.wires.get("reduce_scatter")
    if form is None or group.scatter_parts == 1:
        return grad.to(group.reduce_dtype).to(group.dtype)
    flat = torch.nn.functional.pad(grad.reshape(-1).to(group.dtype), (0, -grad.numel() % form.block))
    rounded(flat.contiguous(), form, flat)
    return flat[: grad.numel()].view(grad.shape)


class PlainUnits:
    """Runs units as ordinary functions, with the plan's casts, and finds the first output that differs."""

    def __init__(self, task: ProofTask) -> None:
        self.task, self.plan = task, (plan := task.plan)
        self.inside = self.listening = False
        self.count = 0
        self.first: Difference | None = None
        self.casting = casting_of(plan.precision, plan.leaves)

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the unit's function. Calls in a unit belong to the outer unit; calls in a transform are silent."""
        if self.inside or not self.listening or peek_interpreter_stack() is not None:
            return unit.fn(params, *args, **kwargs)
        self.inside = True
        try:
            result = unit.fn(params, *args, **kwargs)
        finally:
            self.inside = False
        self.first = self.first or _compared(self.task, self.count, tensors_of(result))
        self.count += 1
        return result

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Compare calls inside of this context: later calls, such as in a backward, compute an output again."""
        self.listening = True
        try:
            yield
        finally:
            self.listening = False

    def tree(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The parameter tree of ordinary tensors whose units call this object."""
        for path, tensor in leaves.items():
            attach(tensor, Slot(self, path, self.casting, self.plan.leaves[path].shape))
        return tree.nest({path: leaves[path] for path in self.plan.leaves})


def _run(task: ProofTask, leaves: dict[str, Tensor]) -> PlainPass:
    """Run the loss on this rank's batch."""
    trained = {path: leaf for path, leaf in leaves.items() if leaf.requires_grad}
    places, sums = task.plan.places(), dict[str, Tensor]()
    total, count, weighted = 0.0, 0.0, False
    units, mesh = PlainUnits(task), task.plan.mesh
    part = mesh.index(task.plan.data_axes)
    torch.clear_autocast_cache()
    with seeded(task.state.seed, task.state.step, part, mesh.device):
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
                    group = places[path][0]
                    sums[path] = sums.get(path, 0) + _reduced(group, grad.resolve_conj())
    first = units.first
    if first is None and units.count != len(task.outputs):
        told = f"{len(task.outputs)} calls of units in the step, {units.count} in plain PyTorch"
        first = Difference(0, units.count, mesh.rank, "(the program)", told)
    return PlainPass(total, count, sums, weighted, first)


def _compared(task: ProofTask, at: int, plain: tuple[Tensor, ...]) -> Difference | None:
    """The difference of an output from that of the step; None if they are equal."""
    rank = task.plan.mesh.rank
    if at >= len(task.outputs):
        return Difference(0, at, rank, "(the program)", f"a call {at} of a unit that the step does not make")
    unit, microbatch, call, tensors = task.outputs[at]
    if len(tensors) != len(plain):
        told = f"{len(tensors)} tensors in the step, {len(plain)} in plain PyTorch"
        return Difference(microbatch, call, rank, unit, told)
    read = [group.compute_dtype for group in task.plan.groups if group.unit == unit]
    for place, (one, other) in enumerate(zip(tensors, plain, strict=True)):
        far, size = gap(one, other)
        if far > task.tolerance.limit(size, [one.dtype, other.dtype, *read]):
            where = f"output {place} of shape {list(other.shape)} of call {call}, microbatch {microbatch},"
            told = f"{where} differs by {far:.3g}; the largest in it is {size:.3g}"
            return Difference(microbatch, call, rank, unit, told)
    return None


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
        sums[group.id] = sums.get(group.id, 0) + whole[begin : begin + owned.chunk]


def earliest(comm: Communicator, first: Difference | None) -> Difference | None:
    """The first output that differs on any rank. Collective."""
    rows = exchange_bytes(comm, json.dumps(astuple(first) if first else None).encode())
    return min((Difference(*row) for row in map(json.loads, rows) if row), default=None)
