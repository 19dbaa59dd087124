"""Gradients of single samples, and sums of them clipped one by one (DP-SGD) in bounded memory.

Parameters are gathered once, outside of the vmap: the adjoint of a gather inside of it would add up the gradients of
different ranks' samples.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.scope import cutting
from fshard.errors import BatchError, PlanError, lines
from fshard.model.remat_function import exact
from fshard.runtime.engine import leading_dims, read_loss
from fshard.runtime.engine.batch import along_rows
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of
from fshard.transform.gather import gather_all
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

    @cutting(plan.mesh)
    def each(params: Any, batch: Any) -> dict[str, Any]:
        _rows(batch)
        trained, rest = split_trainable(plan, params)
        whole = dict(tree.paths(gather_all(plan, {**rest, **trained})))
        return tree.nest(_each(loss_fn, whole, list(trained), batch))

    return each


def clipped_grad(
    loss_fn: LossFn, plan: Plan, clip_norm: float, *, microbatch: int | None = None
) -> Callable[[Any, Any], tuple[dict[str, Any], Tensor]]:
    """The sum over the global batch of the samples' gradients, each clipped to a norm:
    ``clipped_grad(loss_fn, plan, clip_norm)(params, batch) -> (sum, norms)``.

    DP-SGD adds its noise to this sum (Abadi et al., "Deep Learning with Differential Privacy", 2016).

    Args:
        loss_fn: as for ``per_sample_grad``.
        plan: the plan.
        clip_norm: the largest norm, over all leaves, of a sample's gradient; larger ones are scaled down to it.
        microbatch: rows whose gradients are held at once; None for all. The result does not depend on it.

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

    @cutting(plan.mesh)
    def clipped(params: Any, batch: Any) -> tuple[dict[str, Any], Tensor]:
        rows = _rows(batch)
        trained, rest = split_trainable(plan, params)

        def gathered(trained: Flat) -> Flat:
            flat = dict(tree.paths(gather_all(plan, {**rest, **trained})))
            return {path: flat[path] for path in trained}

        pulled: Any = torch.func.vjp(gathered, trained)
        whole, pull = pulled[0], pulled[1]
        fixed = {path: leaf for path, leaf in tree.paths(gather_all(plan, {**rest, **trained})) if path in rest}
        total = {path: torch.zeros_like(leaf) for path, leaf in whole.items()}
        dtype = functools.reduce(torch.promote_types, [leaf.dtype for leaf in whole.values()], torch.float32)
        norms = []
        for start in range(0, rows, microbatch or rows):
            part = tree.mapped(lambda x, a=start: x[a : a + (microbatch or rows)] if _has_rows(x) else x, batch)
            grads = _each(loss_fn, {**fixed, **whole}, list(trained), part)
            squares = [g.reshape(len(g), -1).to(dtype).square().sum(1) for g in grads.values()]
            norms.append(torch.stack(squares).sum(0).sqrt())
            factor = (clip_norm / norms[-1]).clamp(max=1.0)  # 0 / 0 does not occur: clip_norm is positive
            for path, g in grads.items():
                total[path] = total[path] + torch.tensordot(factor.to(g), g, 1)
        (summed,) = pull(total)
        return zero_filled(plan, summed, rest), torch.cat(norms)

    return clipped


def _each(loss_fn: LossFn, whole: Flat, paths: list[str], batch: Any) -> Flat:
    """The gradient of each row by these leaves."""
    leaves, spec = tree.flatten(batch)
    at = [i for i, leaf in enumerate(leaves) if _has_rows(leaf)]

    def one(trained: Flat, row: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for i, x in zip(at, row, strict=True):
            filled[i] = x.unsqueeze(0)
        with exact():
            loss = read_loss(loss_fn(tree.nest({**whole, **trained}), tree.unflatten(spec, filled)))
        return loss.total if loss.count is None else loss.total / loss.count

    trained = {path: whole[path] for path in paths}
    grads: Flat = torch.vmap(torch.func.grad(one), (None, 0))(trained, [leaves[i] for i in at])
    return grads


def _check_whole(plan: Plan, what: str) -> None:
    """Refuse samples that several ranks have parts of: each rank would clip its part as if it were a sample."""
    spec = plan.batch
    if not along_rows(spec) or any(plan.mesh.axis_size(axes_of(entry)) > 1 for entry in spec.dims[1:]):
        raise PlanError(
            f"fs.func.{what}: samples lie along dim 0, and batch={spec} cuts other dims, so that ranks would take "
            f"parts of samples for samples: share them along dim 0 alone, batch=P('axis'), with the samples there"
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
