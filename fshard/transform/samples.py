"""Gradients of single samples, and sums of them clipped one by one (DP-SGD) in bounded memory.

Parameters are gathered once, outside of the vmap: the adjoint of a gather inside of it would add up the gradients of
different ranks' samples.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.scope import bind, cutting
from fshard.errors import BatchError, PlanError, lines
from fshard.runtime.comm import collective_call, telling
from fshard.runtime.engine import leading_dims, read_loss
from fshard.runtime.engine.batch import along_rows, check_device
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of
from fshard.state.equal import Equal
from fshard.transform.gather import gather_all, gather_some
LayerCall=Row=SampleGradients=proved_layers=sample_gradients=object
from fshard.transform.meeting import LossMeeting, meeting
from fshard.transform.sharded_loss import LossFn, check_loss
from fshard.transform.tree_vectors import split_trainable, zero_filled

Flat = dict[str, Tensor]


def per_sample_grad(loss_fn: LossFn, plan: Plan) -> Callable[[Any, Any], dict[str, Any]]:
    """The gradient of each sample's own loss: ``per_sample_grad(loss_fn, plan)(params, batch)``.

    Args:
        loss_fn: as for ``fs.make_train_step``; it is called with batches of one row. An ``fs.Mean`` counts as
            the mean of that row.
        plan: the plan.

    Returns:
        The function. It returns a tree of the trainable leaves, each of shape ``(rows of this rank's batch, *whole leaf
        shape)``: whole leaves for all samples of this rank, in the memory of as many models; ``clipped_grad`` needs
        less.

    Raises:
        PlanError: ranks share the samples themselves: the plan's ``batch=`` cuts another dim than the first.
        BatchError: tensors of the batch have different numbers of rows, or there are no tensors.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> grads = per_sample_grad(lambda params, batch: (batch @ params["w"]).sum(), plan)
    >>> grads({"w": w.flatten()}, torch.ones(3, 2))["w"].shape
    torch.Size([3, 2, 2])
    """
    check_loss(loss_fn, plan)
    _check_whole(plan, "per_sample_grad")

    @telling(plan.mesh, always=False)
    def each(params: Any, batch: Any) -> dict[str, Any]:
        trained, rest, ranks = _met(plan, params, batch, {"tool": "per_sample_grad"})
        with cutting(plan.mesh):
            whole = dict(tree.paths(gather_all(plan, {**rest, **trained})))
        loss, tensors = _of_rows(loss_fn, plan, batch)
        found: Flat = ranks.all_ranks("the gradients", lambda: _each(loss, whole, list(trained), tensors))
        return tree.nest(found)

    return each


def clipped_grad(
    loss_fn: LossFn, plan: Plan, clip_norm: float, *, microbatch: int | None = None
) -> Callable[[Any, Any], tuple[dict[str, Any], Tensor]]:
    """The sum over the global batch of the samples' gradients, each clipped to a norm:
    ``clipped_grad(loss_fn, plan, clip_norm)(params, batch) -> (sum, norms)``.

    DP-SGD adds its noise to this sum (Abadi et al., "Deep Learning with Differential Privacy", 2016). No gradients of
    single samples are held of weights that ``F.linear`` or ``F.embedding`` alone read, as their modules do: norms and
    sum come from the inputs of these layers and the gradients of their outputs. Of other leaves, such as biases, norms,
    convolutions and tied embeddings, they are held for the rows of a microbatch.

    Args:
        loss_fn: as for ``per_sample_grad``.
        plan: the plan.
        clip_norm: the largest norm, over all leaves, of a sample's gradient; larger ones are scaled down to it.
        microbatch: rows that are computed at once; None for all. The result does not depend on it.

    Returns:
        The function. ``sum`` is a tree of shards like ``params``, zero for frozen leaves; ``norms``, ``(rows,)``, are
        the norms of this rank's samples before clipping.

    Raises:
        PlanError: ``clip_norm`` or ``microbatch`` is not positive, or ranks share the samples themselves.
        BatchError: tensors of the batch have different numbers of rows, or there are no tensors.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> clipped = clipped_grad(lambda params, batch: (batch @ params["w"]).sum(), plan, clip_norm=1.0)
    >>> clipped({"w": w.flatten()}, torch.tensor([[1.0, 1.0], [0.1, 0.1]]))
    ({'w': tensor([0.6000, 0.6000, 0.6000, 0.6000])}, tensor([2.0000, 0.2000]))
    """
    check_loss(loss_fn, plan)
    _check_whole(plan, "clipped_grad")
    expect("clipped_grad(loss_fn, plan, clip_norm)", [("clip_norm", clip_norm, (int, float), "a positive number")])
    if not clip_norm > 0 or (microbatch is not None and (not isinstance(microbatch, int) or microbatch < 1)):
        raise PlanError(f"clipped_grad(clip_norm={clip_norm}, microbatch={microbatch}): both must be positive")

    return ClippedGradient(loss_fn, plan, float(clip_norm), microbatch)


@dataclass(frozen=True)
class ClippedGradient:
    """``clipped(params, batch) -> (sum, norms)``. Made by ``fs.func.clipped_grad``."""

    loss_fn: LossFn
    plan: Plan
    clip_norm: float
    microbatch: int | None
    known: dict[Any, list[LayerCall]] = field(default_factory=dict, repr=False, compare=False)

    @collective_call
    def __call__(self, params: Any, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """The sum of clipped gradients, and the norms of this rank's samples before clipping.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
            PeerError: another rank failed.
        """
        settings = {"tool": "clipped_grad", "clip_norm": self.clip_norm}
        trained, rest, ranks = _met(self.plan, params, batch, settings)
        with cutting(self.plan.mesh):
            pulled: Any = torch.func.vjp(lambda p: gather_some(self.plan, p, True), trained)
            fixed = gather_some(self.plan, rest, False)
        total, norms = ranks.all_ranks("the gradients", lambda: self._summed(fixed, pulled[0], batch))
        with cutting(self.plan.mesh):
            (summed,) = pulled[1](total)
            return zero_filled(self.plan, summed, rest), norms

    def _summed(self, fixed: Flat, whole: Flat, batch: Any) -> tuple[Flat, Tensor]:
        """This rank's sum, of whole leaves, and the norms."""
        loss, tensors = _of_rows(self.loss_fn, self.plan, batch)
        leaves, paths = {**fixed, **whole}, list(whole)
        total = {path: torch.zeros_like(leaf) for path, leaf in whole.items()}
        dtype = functools.reduce(torch.promote_types, [leaf.dtype for leaf in whole.values()], torch.float32)
        norms, calls = list[Tensor](), self._layers(loss, leaves, paths, tensors)
        for rows in zip(*[torch.split(x, self.microbatch or len(x)) for x in tensors], strict=True):
            grads = sample_gradients(loss, leaves, paths, list(rows), calls)
            if grads is None:  # rows that call other layers than the first one did
                grads = SampleGradients(_each(loss, leaves, paths, list(rows)))
            norms.append(grads.squares(leaves, dtype).sqrt())
            factor = (self.clip_norm / norms[-1]).clamp(max=1.0)  # 0 / 0 does not occur: clip_norm is positive
            for path, g in grads.summed(leaves, factor).items():
                total[path] = total[path] + g
        return total, torch.cat(norms)

    def _layers(self, loss: Row, leaves: Flat, paths: list[str], tensors: list[Tensor]) -> list[LayerCall]:
        """The layers of rows of these shapes, found once."""
        key = tuple((x.shape[1:], x.dtype) for x in tensors)
        if key not in self.known:
            self.known[key] = proved_layers(loss, leaves, paths, tensors)
        return self.known[key]


def _of_rows(loss_fn: LossFn, plan: Plan, batch: Any) -> tuple[Row, list[Tensor]]:
    """The loss of one row, and the tensors that have rows."""
    leaves, spec = tree.flatten(batch)
    at = [i for i, leaf in enumerate(leaves) if _has_rows(leaf)]

    def one(params: Mapping[str, Tensor], row: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for i, x in zip(at, row, strict=True):
            filled[i] = x.unsqueeze(0)
        with bind(plan.mesh, plan.data_axes, single=True):
            loss = read_loss(loss_fn(tree.nest(params), tree.unflatten(spec, filled)))
        return loss.total if loss.count is None else loss.total / loss.count

    return one, [leaves[i] for i in at]


def _each(loss: Row, leaves: Flat, paths: list[str], rows: list[Tensor]) -> Flat:
    """The gradient of each row by these leaves."""
    found = sample_gradients(loss, leaves, paths, rows, ())
    return {} if found is None else found.held


def _met(plan: Plan, params: Any, batch: Any, settings: dict[str, Any]) -> tuple[Flat, Flat, LossMeeting]:
    """The trainable leaves, the others, and the ranks, when all have checked their arguments."""
    ranks = meeting(plan.mesh, batch, BatchRows(), params)

    def checked() -> tuple[Flat, Flat]:
        _rows(batch)
        check_device(batch, plan.mesh.device)
        return split_trainable(plan, params)

    if plan.mesh.size > 1 and plan.mesh.transport is None:
        checked()  # outside of run, where ranks cannot meet, an error says how trees of whole tensors are given
    trained, rest = ranks.all_ranks("the call", checked, ranks.facts(Equal(plan, settings)))
    return trained, rest, ranks


def _check_whole(plan: Plan, what: str) -> None:
    """Refuse samples or leaves that several ranks have parts of: each rank would clip its part as if it were all."""
    spec = plan.batch
    if not along_rows(spec) or any(plan.mesh.axis_size(axes_of(entry)) > 1 for entry in spec.dims[1:]):
        raise PlanError(
            f"fs.func.{what}: samples lie along dim 0, and batch={spec} cuts other dims, so that ranks would take "
            f"parts of samples for samples: share them along dim 0 alone, batch=P('axis'), with the samples there"
        )
    cut = [leaf for leaf in plan.leaves.values() if plan.mesh.axis_size(leaf.compute.axes) > 1]
    if cut:
        raise PlanError(
            f"fs.func.{what}: ranks compute with parts of {len(cut)} leaves, such as {cut[0].path} "
            f"{list(cut[0].shape)} by {cut[0].compute}, and the gradient of a sample is that of whole leaves: take it "
            f"on a mesh on which the axes {cut[0].compute.axes} have one rank, for example from a checkpoint"
        )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _rows(batch: Any) -> int:
    """The number of rows of a batch."""
    dims = leading_dims(batch)
    if not dims or len(set(dims)) > 1 or not dims[0]:
        shapes = [f"leaf {i}: {list(x.shape)}" for i, x in enumerate(tree.leaves(batch)) if isinstance(x, Tensor)]
        head = "the tensors of the batch do not have one row a sample:"
        raise BatchError(
            lines(head, shapes, "Give tensors with the samples along dim 0, at least one; 0-dim ones go to all.")
        )
    return dims[0]
