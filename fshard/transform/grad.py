"""``fs.value_and_grad``: on the scheduled executor, or under a transform on the path that transforms can follow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.scope import bind
from fshard.errors import PlanError
from fshard.runtime.execution import Shard, Shield
from fshard.runtime.steps import Request, Runner, make_programs
from fshard.schedule.ops import Op
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.pack import cut_pieces, join_pieces
from fshard.training.metrics import combine_aux
from fshard.transform.loss import LossFn, ShardedLoss
from fshard.transform.trees import split_trainable, zero_filled

_TENSOR = object()


class ValueAndGrad:
    """``(params, batch) -> (loss, grads)``. Made by ``fs.value_and_grad``."""

    def __init__(self, loss: ShardedLoss, policy: Policy) -> None:
        # The result is the gradient of all that a rank keeps, not only of the part that its optimizer would update.
        groups = tuple(replace(group, opt_axes=(), opt_parts=1) for group in loss.plan.groups)
        self.loss, self.plan = loss, replace(loss.plan, groups=groups)
        self._runner = Runner(loss.loss_fn, make_programs(self.plan, policy, poison=loss.debug))
        self._equal = Equal(self.plan, {"schedule": policy, "debug": loss.debug})

    def __repr__(self) -> str:
        return f"<value and grad of {self.loss!r}>"

    def __call__(self, params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The global mean loss and its gradient.

        Args:
            params: this rank's part of the parameters, such as ``state.params``. They are only read.
            batch: this rank's part of the global batch.

        Returns:
            The loss, 0-dim and equal on all ranks, or ``(loss, aux)``; and the gradients, a tree of shards like
            ``params``, zero for frozen leaves.

        Raises:
            TreeError, BatchError, LossError, UnitError: arguments or a loss that break a rule; alike on all ranks.
            PeerError: another rank failed.
        """
        flat = self.plan.check_tree(params, whole=False)
        if under_way(list(flat.values())):
            return self._transformed(params, batch)
        with Shield() as shield:
            result = self._scheduled(flat, batch, shield)
        if shield.late is not None:
            raise shield.late
        return result

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest call on the executor."""
        schedule = self._runner.latest.schedule
        if schedule is None:
            raise PlanError("no schedule yet: call the function once, outside of transforms; it needs a batch")
        return schedule

    @property
    def record(self) -> tuple[Op, ...]:
        """The ops that the latest call on the executor ran on this rank."""
        return tuple(self._runner.latest.record)

    def _transformed(self, params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        trained, rest = split_trainable(self.plan, params)

        kept: list[Any] = []

        def of(trained: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            found = self.loss(tree.nest({**rest, **trained}), batch)
            value, aux = found if self.loss.has_aux else (found, {})
            leaves, spec = tree.flatten(aux)  # torch.func takes only tensors
            kept[:] = [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
            return value, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        grads, (value, tensors) = torch.func.grad_and_value(of, has_aux=True)(trained)
        spec, leaves = kept
        found = iter(tensors)
        aux = tree.unflatten(spec, [next(found) if leaf is _TENSOR else leaf for leaf in leaves])
        return ((value, aux) if self.loss.has_aux else value), zero_filled(self.plan, grads, rest)

    def _scheduled(self, flat: dict[str, Tensor], batch: Any, shield: Shield) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            shards = []
            for group in self.plan.groups:
                pieces = [flat[leaf.path].detach() for leaf in group.leaves]
                shards.append(Shard(join_pieces(group, self.plan.mesh, pieces), {}))
        with bind(self.plan.mesh, self.plan.data_axes):
            outcome = self._runner.run(Request(batch, shards, shield, facts=self._equal.fixed))
        verdict, total = outcome.verdict, outcome.losses[0][0]
        dtype = torch.promote_types(total.dtype, torch.float32)
        value = torch.tensor(verdict.loss, dtype=dtype, device=total.device)
        self.loss.refuse_aux(outcome.aux[0] if outcome.aux else {})
        if self.loss.has_aux:
            return (value, combine_aux(outcome.aux, verdict.means)), self._grads(flat, verdict.scale)
        return value, self._grads(flat, verdict.scale)

    def _grads(self, flat: dict[str, Tensor], scale: float) -> dict[str, Any]:
        out: dict[str, Tensor] = {}
        for group in self.plan.groups:
            if group.trainable:  # a copy: the next call overwrites the executor's buffer
                pieces = cut_pieces(group, self.plan.mesh, self._runner.programs.memory.homes[group.id] * scale)
            else:
                pieces = [torch.zeros_like(flat[leaf.path]) for leaf in group.leaves]
            out.update((leaf.path, piece) for leaf, piece in zip(group.leaves, pieces, strict=True))
        return tree.nest({path: out[path] for path in self.plan.leaves})


def value_and_grad(
    loss_fn: LossFn, plan: Plan, *, has_aux: bool = False, schedule: Policy | None = None, debug: bool = False
) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """The global mean loss and its gradient, as a function of this rank's shards (``jax.value_and_grad``).

    At the outermost level it runs on the scheduled executor like a train step without the update: gathers and
    reductions overlap with compute. Under a transform of ``torch.func``, or where autograd records (a parameter
    requires grad, or has a forward-mode tangent), it runs ``fs.sharded_loss``, and can be differentiated.

    Args:
        loss_fn: as for ``fs.make_train_step``.
        plan: the plan.
        has_aux: return ``((loss, aux), grads)``.
        schedule: as for ``fs.make_train_step``; under a transform only ``reshard`` matters.
        debug: fill freed memory with nan, and check what ``fs.sharded_loss(debug=True)`` checks.

    >>> import fshard as fs
    >>> params = {"w": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    >>> fs.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan)(fs.shard(params, plan), torch.arange(3.0))
    (tensor(3.), {'w': tensor([0., 1., 2.])})
    """
    policy = Policy() if schedule is None else schedule
    if not isinstance(policy, Policy) or policy.update != "deferred":
        raise PlanError(
            f"schedule={schedule!r}: give fs.Policy(...) with update='deferred', since there is no update here"
        )
    return ValueAndGrad(ShardedLoss(loss_fn, plan, has_aux, policy.reshard is not False, debug), policy)


def under_way(tensors: list[Tensor]) -> bool:
    """Whether a transform runs, or autograd records operations on these tensors."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    level = torch.autograd.forward_ad._current_level
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return level >= 0 and any(unpack(tensor).tangent is not None for tensor in tensors)
