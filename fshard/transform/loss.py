"""``fs.func.sharded_loss``: the global mean loss as a pure function of one rank's shards."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.linear import Settle, Spread, Sum, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import bind, cutting
from fshard.errors import CommError, LossError, PeerError, ScheduleError, UnitError, lines
from fshard.model.remat import exact
from fshard.runtime.comm import (
    Communicator,
    Facts,
    announce,
    collective_call,
    digest,
    exchange,
    exchange_text,
    mesh_communicator,
)
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.facts import compare_numbers
from fshard.runtime.engine import Mean, fingerprint, leading_dims, means_of, read_loss
from fshard.runtime.engine.batch import check_device
from fshard.runtime.engine.loss import Loss
from fshard.runtime.execution.executor import diverged
from fshard.runtime.steps import raise_failure
from fshard.runtime.steps.consensus import CUT, FAILED, OK
from fshard.runtime.steps.refusals import unlike_losses
from fshard.runtime.steps.rows import NUMBERS, Rows, rows_of, uneven_rows
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.torch_internals import DisableFuncTorch
from fshard.transform.gather import Resharding, Versions, gather_all

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ShardedLoss:
    """``f(params, batch) -> loss``. Made by ``fs.func.sharded_loss``."""

    loss_fn: LossFn
    plan: Plan
    has_aux: bool
    reshard: bool
    debug: bool

    def __post_init__(self) -> None:
        check_loss(self.loss_fn, self.plan)

    @functools.cached_property
    def _rows(self) -> Rows:
        return rows_of(self.plan.batch, self.plan.mesh)

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
        comm = mesh_communicator(self.plan.mesh)
        with cutting(self.plan.mesh):
            # Before the first gather: a rank whose arguments are bad must not leave the others waiting.
            facts = self._equal.fixed() if comm.size > 1 else Facts()
            flat = self._all_ranks("the call", batch, lambda: self._checked(params, batch), facts)
            if self.debug:
                self._check_replicas(flat)
            loss = self._all_ranks("the loss", batch, lambda: self._run(flat, batch))
            value, aux = self._mean(loss)
            if self.debug:
                self._check_rank_free(flat, batch, loss)
            return (value, aux) if self.has_aux else value

    def _all_ranks(
        self,
        place: str,
        batch: Any,
        body: Callable[[], Any],
        facts: Facts = Facts(),  # noqa: B008 - a frozen value
    ) -> Any:
        """What ``body`` returns; what it raises on any rank is raised on all."""
        comm, value, failure = mesh_communicator(self.plan.mesh), None, None
        try:
            with cutting(self.plan.mesh):  # others may wait in a collective, and learn of a failure only here
                value = body()
        except (PeerError, ScheduleError):
            raise  # the other ranks know
        except CommError as error:
            # A rank that failed cut this collective off, or the connection to a rank was lost.
            with suppress(CommError):
                _handshake(comm, place, batch, failure=error)
            raise
        except Exception as error:
            failure = error
        _handshake(comm, place, batch, value if isinstance(value, Loss) else None, failure, facts, self._rows)
        return value

    def _checked(self, params: Any, batch: Any) -> dict[str, Tensor]:
        flat = self.plan.check_tree(params, whole=False)
        check_device(batch, self.plan.mesh.device)
        return flat

    def _run(self, flat: dict[str, Tensor], batch: Any) -> Loss:
        versions = Versions()
        for i, x in enumerate(tree.leaves(batch)):
            if isinstance(x, Tensor):
                versions.add(f"batch leaf {i}", x)
        try:
            bound = bind(self.plan.mesh, self.plan.data_axes)
            with self._params(flat, batch, versions) as params, bound, exact():
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
        self, flat: dict[str, Tensor], batch: Any, versions: Versions
    ) -> AbstractContextManager[dict[str, Any]]:
        if self.reshard:
            comm = mesh_communicator(self.plan.mesh)
            return Resharding(self.plan, flat, lambda unit: _handshake(comm, unit, batch), versions).params()
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
            table = apply(table, Sum(data))
        means = [
            (row[0] / row[1].detach()).to(torch.promote_types(part.total.dtype, torch.float32))
            for row, part in zip(table.unbind(0), parts, strict=True)
        ]
        found = iter(means[1:])
        return means[0], tree.map(lambda leaf: next(found) if isinstance(leaf, Mean) else leaf, loss.aux)

    def _check_replicas(self, flat: dict[str, Tensor]) -> None:
        """Refuse replicas of a leaf that differ."""
        for group in self.plan.groups:
            held = (*group.gather_axes, *group.leaves[0].compute.axes)
            copies = Ranks(self.plan.mesh, tuple(a for a in self.plan.mesh.axis_names if a not in held))
            if copies.size > 1:
                for leaf in group.leaves:
                    apply(flat[leaf.path].detach(), Settle(copies, f"params {leaf.path}", True))

    def _check_rank_free(self, flat: dict[str, Tensor], batch: Any, loss: Loss) -> None:
        """Refuse a loss that differs between ranks for the same batch."""
        mesh = self.plan.mesh
        others = Ranks(mesh, tuple(a for a in mesh.axis_names if a not in self.plan.data_axes))
        if others.size > 1:
            apply(loss.total.detach(), Settle(others, "the loss of the same batch", True))
        data = Ranks(mesh, self.plan.data_axes)
        with DisableFuncTorch():
            own = torch.tensor([digest(leading_dims(batch))], device="cpu")
            rows = exchange(mesh_communicator(self.plan.mesh), own).flatten().tolist()
        if data.size == 1 or len(set(rows)) > 1:
            return
        same = tree.map(lambda x: apply(x.detach(), Spread(data)) if isinstance(x, Tensor) else x, batch)
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


def sharded_loss(
    loss_fn: LossFn, plan: Plan, *, has_aux: bool = False, reshard: bool = True, debug: bool = False
) -> ShardedLoss:
    """The loss over the global batch, as a pure function of this rank's shards.

    ``f(params, batch)`` composes with everything in ``torch.func``, in any nesting, and with ``torch.autograd``:
    gradients come out as shards, as ``params`` go in. All ranks must apply the same transforms in the same order.
    ``torch.func.linearize`` is refused. What travels is exact, also where ``fs.Wire`` rounds it in steps.

    Args:
        loss_fn: as for ``fs.make_train_step``. With ``fs.Mean`` the global mean is exact.
        plan: the plan.
        has_aux: return ``(loss, aux)``; ``fs.Mean`` leaves of aux become global means, others are this rank's own.
        reshard: gather a unit's parameters where it runs, and gather and compute again in the backward, so that no rank
            holds the whole model. False gathers everything once, which is faster but needs its memory.
        debug: check on each call that replicated leaves are equal on all ranks, and that the loss depends on the rank
            only through its batch.

    Returns:
        The function.

    >>> import fshard as fs
    >>> params = {"w": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> f = fs.func.sharded_loss(lambda p, x: (p["w"] * x).sum(), plan)
    >>> torch.func.grad(f)(fs.shard(params, plan), torch.arange(3.0))
    {'w': tensor([0., 1., 2.])}
    """
    return ShardedLoss(loss_fn, plan, has_aux, reshard, debug)


def _handshake(
    comm: Communicator,
    place: str,
    batch: Any,
    loss: Loss | None = None,
    failure: Exception | None = None,
    facts: Facts = Facts(),  # noqa: B008 - a frozen value
    sizes: Rows = Rows(),  # noqa: B008 - likewise
) -> None:
    """Raise on all ranks the failure of any of them, and refuse losses without a common mean.

    A rank that fails takes part in one more exchange, which has the same form wherever the other ranks are. A rank that
    failed because another one cut its collective off raises that rank's failure.
    """
    status = OK if failure is None else CUT if isinstance(failure, CommError) else FAILED
    mine = [status, digest(place), facts.number, *_mean_row(batch, loss, sizes)]
    with DisableFuncTorch():  # a transform under way would wrap what is sent
        rows = announce(comm, "sharded loss", mine)
        if any(row[0] for row in rows):
            raise_failure(comm, failure, [row[0] for row in rows], status)
        compare_numbers(comm, [row[2] for row in rows], facts)
        if any(row[1] != rows[0][1] for row in rows):
            raise diverged(exchange_text(comm, f"{place} ({call_site()})"))
    if any(row[3:6] != rows[0][3:6] for row in rows):
        raise unlike_losses([(bool(row[3]), row[4], row[5]) for row in rows])
    if uneven := sizes.uneven([row[6:] for row in rows]):
        raise uneven_rows(uneven)


def _mean_row(batch: Any, loss: Loss | None, rows: Rows) -> list[int]:
    """What losses with a common mean have in common, and the sizes of the batch; zeros where there is no plain mean."""
    if loss is None:
        return [0] * (3 + NUMBERS)
    weighted = loss.count is not None
    return [int(weighted), *fingerprint(loss.aux), *([0] * NUMBERS if weighted else rows.numbers(batch))]


def _written(what: list[str]) -> UnitError:
    remedy = "A loss is a pure function: compute new values (x = x + y, not x += y)."
    return UnitError(lines("the loss function wrote in place to its arguments:", what, remedy))
