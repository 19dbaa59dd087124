"""``fs.func.sharded_loss``: the global mean loss as a pure function of one rank's shards."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.linear import LinearSum, Settle, Spread, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import bind, cutting
from fshard.errors import LossError, UnitError, lines
from fshard.model.remat_function import exact
from fshard.runtime.comm import collective_call, digest
from fshard.runtime.engine import Mean, leading_dims, means_of, read_loss
from fshard.runtime.engine.batch import check_device
from fshard.runtime.engine.loss_result import Loss
from fshard.runtime.steps.batch_rows import BatchRows, rows_of
from fshard.runtime.steps.consensus import OK
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.equal import Equal
from fshard.torch_internals import forward_ad_level
from fshard.transform.gather import Resharding, Versions, gather_all
from fshard.transform.meeting import LossMeeting, meeting

LossFn = Callable[[Any, Any], Any]
Scheduled = Callable[[], Any]
"""Gives the loss on a schedule, or None if a rank has found none."""


@dataclass(frozen=True)
class ShardedLoss:
    """``f(params, batch) -> loss``, whose units gather their parameters where they run."""

    loss_fn: LossFn
    plan: Plan
    has_aux: bool
    reshard: bool
    debug: bool

    def __post_init__(self) -> None:
        check_loss(self.loss_fn, self.plan)
        flags = {"has_aux": self.has_aux, "reshard": self.reshard, "debug": self.debug}
        expect("sharded_loss(loss_fn, plan)", [(name, flag, bool, "True or False") for name, flag in flags.items()])

    @functools.cached_property
    def _rows(self) -> BatchRows:
        return rows_of(self.plan).of(False, ())

    @functools.cached_property
    def _equal(self) -> Equal:
        return Equal(self.plan, {"has_aux": self.has_aux, "reshard": self.reshard, "debug": self.debug})

    @collective_call
    def __call__(self, params: Any, batch: Any) -> Any:
        """The global mean loss.

        Args:
            params: this rank's part of the parameters, such as ``state.params``.
            batch: this rank's part of the global batch.

        Returns:
            A 0-dim tensor, equal on all ranks; with ``has_aux`` the pair of it and the auxiliary values.

        Raises:
            TreeError, BatchError, LossError: arguments or results that do not fit, alike on all ranks.
            UnitError: the loss function wrote to its arguments in place.
            PeerError: the loss function raised on another rank.
            ReplicationError: plans or options differ between ranks; in debug mode, leaves that must be equal.
        """
        ranks = meeting(self.plan.mesh, batch, self._rows, params)
        with cutting(self.plan.mesh):
            # Before the first gather: a rank whose arguments are bad must not leave the others waiting.
            facts = ranks.facts(self._equal)
            flat, scheduled = ranks.all_ranks("the call", lambda: self._begun(params, batch), facts)
            if self.debug:
                self._check_replicas(flat)
        if scheduled is not None and (found := scheduled()) is not None:
            return found
        return self._gathered(flat, batch, ranks)

    def _gathered(self, flat: dict[str, Tensor], batch: Any, ranks: LossMeeting) -> Any:
        """The loss, gathered where units run."""
        with cutting(self.plan.mesh):
            loss = ranks.all_ranks("the loss", lambda: self._run(flat, batch, ranks))
            value, aux = self._mean(loss)
            if self.debug:
                self._check_rank_free(flat, batch, loss, ranks)
            return (value, aux) if self.has_aux else value

    def _begun(self, params: Any, batch: Any) -> tuple[dict[str, Tensor], Scheduled | None]:
        """The leaves, and what gives the loss on a schedule."""
        return self._checked(params, batch), None

    def _checked(self, params: Any, batch: Any) -> dict[str, Tensor]:
        flat = self.plan.check_tree(params, whole=False)
        check_device(batch, self.plan.mesh.device)
        return flat

    def _run(self, flat: dict[str, Tensor], batch: Any, ranks: LossMeeting) -> Loss:
        versions = Versions()
        for i, x in enumerate(tree.leaves(batch)):
            if isinstance(x, Tensor):
                versions.add(f"batch leaf {i}", x)
        try:
            bound = bind(self.plan.mesh, self.plan.data_axes)
            with self._params(flat, ranks, versions) as params, bound, exact():
                loss = read_loss(self.loss_fn(params, batch))
        except RuntimeError as error:
            if "in-place operation" not in str(error):
                raise
            raise _written(["a parameter, or a tensor of the batch, that requires grad"]) from error
        if written := versions.written():
            raise _written(written)
        self.refuse_aux(loss.aux)
        return loss

    def refuse_aux(self, aux: Any) -> None:
        """Refuse auxiliary values without ``has_aux``, which would be dropped."""
        if aux and not self.has_aux:
            raise LossError(
                f"the loss function returned aux values {list(aux)}, which this function has no place for: pass "
                f"has_aux=True, as to torch.func.grad, and it returns (loss, aux)"
            )

    def _params(
        self, flat: dict[str, Tensor], ranks: LossMeeting, versions: Versions
    ) -> AbstractContextManager[dict[str, Any]]:
        if forward_ad_level() >= 0:
            # A tangent has the layout of its primal's storage. A copy has one of its own, and any view can be taken of
            # it.
            flat = {path: leaf.clone() for path, leaf in flat.items()}
        if self.reshard:
            return Resharding(self.plan, flat, ranks.handshake, versions).params()
        params = gather_all(self.plan, flat)
        for path, leaf in tree.paths(params):
            versions.add(f"params {path}", leaf)
        return nullcontext(params)

    def _mean(self, loss: Loss) -> tuple[Tensor, Any]:
        """The mean over the data axes of the loss and of every ``fs.Mean`` in aux, by one sum."""
        parts = [Mean(loss.total, 1.0 if loss.count is None else loss.count), *means_of(loss.aux)]
        counts = [torch.as_tensor(p.count, dtype=torch.float64, device=p.total.device).detach() for p in parts]
        table = torch.stack([torch.stack((p.total.double(), count)) for p, count in zip(parts, counts, strict=True)])
        data = Ranks(self.plan.mesh, self.plan.data_axes)
        if data.size > 1:
            table = apply(table, LinearSum(data))
        means = [
            (row[0] / row[1].detach()).to(torch.promote_types(part.total.dtype, torch.float32))
            for row, part in zip(table.unbind(0), parts, strict=True)
        ]
        found = iter(means[1:])
        return means[0], tree.mapped(lambda leaf: next(found) if isinstance(leaf, Mean) else leaf, loss.aux)

    def _check_replicas(self, flat: dict[str, Tensor]) -> None:
        """Refuse replicas of a leaf that differ."""
        for group in self.plan.groups:
            held = (*group.gather_axes, *group.leaves[0].compute.axes)
            copies = Ranks(self.plan.mesh, tuple(a for a in self.plan.mesh.axis_names if a not in held))
            if copies.size > 1:
                for leaf in group.leaves:
                    apply(flat[leaf.path].detach(), Settle(copies, f"params {leaf.path}", True))

    def _check_rank_free(self, flat: dict[str, Tensor], batch: Any, loss: Loss, ranks: LossMeeting) -> None:
        """Refuse a loss that differs between ranks for the same batch."""
        mesh = self.plan.mesh
        others = Ranks(mesh, tuple(a for a in mesh.axis_names if a not in self.plan.data_axes))
        if others.size > 1:
            apply(loss.total.detach(), Settle(others, "the loss of the same batch", True))
        data = Ranks(mesh, self.plan.data_axes)
        rows = ranks.rows([OK, digest(leading_dims(batch))])
        if data.size == 1 or any(row != rows[0] for row in rows):
            return
        same = tree.mapped(lambda x: apply(x.detach(), Spread(data)) if isinstance(x, Tensor) else x, batch)
        with torch.no_grad():
            detached = {path: leaf.detach() for path, leaf in flat.items()}
            with bind(self.plan.mesh, self.plan.data_axes):
                again = read_loss(self.loss_fn(gather_all(self.plan, detached), same))
            label = "the loss of one batch (what depends on the rank must be part of the batch, or come from it)"
            apply(again.total, Settle(data, label, True))


def check_loss(loss_fn: Any, plan: Any) -> None:
    """Refuse anything but a function and a plan."""
    wants: list[Want] = [
        ("loss_fn", loss_fn, Callable, "a function of (params, batch)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("(loss_fn, plan)", wants)
    refuse_stages("derivatives of a loss", plan)


class GatheredLoss(ShardedLoss):
    """The same loss as a function of compute leaves that each rank has gathered, whose gradient is not added up."""

    def _checked(self, params: Any, batch: Any) -> dict[str, Tensor]:
        check_device(batch, self.plan.mesh.device)
        return dict(tree.paths(params))

    def _params(
        self, flat: dict[str, Tensor], ranks: LossMeeting, versions: Versions
    ) -> AbstractContextManager[dict[str, Any]]:
        for path, leaf in flat.items():
            versions.add(f"params {path}", leaf)
        return nullcontext(tree.nest({path: flat[path] for path in self.plan.leaves}))


def _written(what: list[str]) -> UnitError:
    remedy = "A loss is a pure function: compute new values (x = x + y, not x += y)."
    return UnitError(lines("the loss function wrote in place to its arguments:", what, remedy))
