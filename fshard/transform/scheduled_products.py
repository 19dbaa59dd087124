"""Hessian-vector products on a schedule: the gradient of a loss's derivative along a direction.

That derivative is a function of parameters and of their tangents, of which no gradient is taken. So a product is the
gradient of a loss of twice the groups, half of them frozen: it runs as a gradient does, gathered ahead, with reductions
in flight. The gradient of the loss itself, which nobody reads, is never added up.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from fshard import tree
from fshard.collectives.scope import SCOPE, bind
from fshard.errors import ShardError
from fshard.model.casting import make_casting
from fshard.model.unit import Unit
from fshard.runtime.comm.call_site import in_program
from fshard.runtime.engine import Mean, read_loss
from fshard.runtime.engine.batch import check_device, signature
from fshard.runtime.execution import ProgramTrace, Shard, Shards, held_back
from fshard.runtime.steps import Outcome, Runner, StepRequest, make_programs
from fshard.runtime.steps.step_options import RunOptions
from fshard.schedule.auto import Auto
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import Flat, flat_of, form_of
from fshard.torch_internals import DispatchModeKey, dispatch_mode
from fshard.transform.active_transforms import under_way
from fshard.transform.dual_units import DualUnits
from fshard.transform.linearized import plain_attention
from fshard.transform.sharded_loss import ShardedLoss
from fshard.transform.tangent_plan import pairs, with_tangents


@dataclass(frozen=True, eq=False)
class Slope:
    """A loss's derivative along a direction, as a loss function of a plan with tangents.

    Attributes:
        loss: the loss.
        plan: the plan without tangents.
        known: the units of parameters and tangents made so far.
    """

    loss: ShardedLoss
    plan: Plan
    known: dict[Unit, Unit] = field(default_factory=dict, repr=False)

    def __call__(self, params: Any, batch: Any) -> Any:
        """The derivative, an ``fs.Mean`` if the loss is one."""
        count: list[Any] = []
        leaves = self.plan.leaves
        casting = make_casting(self.plan.precision, {path: leaf.precision for path, leaf in leaves.items()})

        def of(_: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            with DualUnits(pairs(self.plan, params), self.known) as units:
                handles = units.handles({path: leaf.shape for path, leaf in leaves.items()}, casting)
                found = read_loss(self.loss.loss_fn(tree.nest(handles), batch))
            self.loss.refuse_aux(found.aux)
            count[:] = [found.count]
            return found.total, (found.count,) if isinstance(found.count, Tensor) else ()

        with plain_attention():
            zero = torch.zeros((), device=self.plan.mesh.device)
            _, slope, counts = jvp(of, (zero,), (zero,), has_aux=True)  # type: ignore[misc]
        if count[0] is None:
            return slope
        return Mean(slope, counts[0] if counts else count[0])


class ScheduledProduct:
    """``product(params, v, batch)`` on a schedule, on one rank.

    Args:
        loss: the loss.
        plan: the plan as this rank holds it.
        double: the same with tangents.
        running: how it runs.

    Attributes:
        runner: runs it.
    """

    def __init__(self, loss: ShardedLoss, plan: Plan, double: Plan, running: RunOptions) -> None:
        self.plan, self.form = plan, form_of(plan)
        self.programs = make_programs(double, running)
        self.runner = Runner(Slope(loss, plan), self.programs, "Hessian-vector product")
        self.equal = Equal(plan, {"tool": "hvp", **running.told()})
        self._trained = [group.id for group in plan.groups if group.trainable]
        self._problems: dict[Hashable, str] = {}

    def problem(self, batch: Any) -> str:
        """Say why no trace finds a program for batches like this one; empty if one does."""
        key = signature(batch)
        if key in self._problems:
            return self._problems[key]
        try:
            with bind(self.plan.mesh, self.plan.data_axes):
                found = self.runner.finder.look(batch)
        except Exception as error:  # the path of transforms raises it again, where it is one of the loss function
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if isinstance(error, ShardError | RuntimeError):
                self._problems[key] = problem
            return problem
        if found is None:
            return "the program depends on values of the batch's tensors"
        self._problems[key] = ""
        self._fits(found)
        return ""

    def _fits(self, found: ProgramTrace) -> None:
        """Refuse a program that no schedule runs in the memory that there is, before anything is sent.

        Raises:
            PlanError: naming what takes the most.
        """
        if isinstance(self.programs.policy, Auto) and self.programs.policy.memory is not None:
            self.programs.trace(found)

    def __call__(self, params: Any, v: Any, batch: Any) -> dict[str, Any]:
        """The product, of arguments that were checked."""
        with torch.no_grad():
            at, along = flat_of(params, self.form).chunks, flat_of(v, self.form).chunks
        chunks = [at[group.id] for group in self.plan.groups] + [along[group] for group in self._trained]
        shards = Shards([Shard(chunk.detach(), {}) for chunk in chunks])
        with held_back() as shield, torch.enable_grad():
            with bind(self.plan.mesh, self.plan.data_axes):
                outcome = self.runner.run(StepRequest(batch, shards, shield, facts=self.equal.fixed))
            return self._result(outcome)

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        homes = self.programs.memory.homes
        # Copies: the next product overwrites the buffers of this one.
        chunks = {group: homes[group] * outcome.verdict.scale for group in self._trained}
        return Flat(self.form, chunks | self.form.zero_chunks()).tree()


class ProductSchedules:
    """The scheduled products of a loss: one for each rank that this process plays.

    Args:
        loss: the loss.
        running: how products run.
    """

    def __init__(self, loss: ShardedLoss, running: RunOptions) -> None:
        self.loss, self.running = loss, running
        self._made: dict[int, ScheduledProduct | None] = {}

    @property
    def here(self) -> ScheduledProduct | None:
        """The one of this rank; None where the plan has none."""
        plan = self.loss.plan.here
        rank = plan.mesh.rank
        if rank not in self._made:
            double = with_tangents(plan)
            self._made[rank] = None if double is None else ScheduledProduct(self.loss, plan, double, self.running)
        return self._made[rank]

    def find(self, params: Any, v: Any, batch: Any) -> tuple[ScheduledProduct | None, str]:
        """The product for checked arguments, or None and the reason why they have no schedule."""
        plan = self.loss.plan.here
        scope = SCOPE.get()
        if plan.mesh.size > 1 and plan.mesh.transport is None:
            return None, "the mesh has no processes"
        if scope is not None and scope.running is not None:
            return None, "a step function makes it"
        if dispatch_mode(DispatchModeKey.FAKE) is not None or in_program() or torch.is_inference_mode_enabled():
            return None, "a function that a step runs makes it"
        if under_way([x for x in tree.leaves((params, v, batch)) if isinstance(x, Tensor)]):
            return None, "a transform is under way"
        if (found := self.here) is None:
            return None, "parameters lie in host memory, or a leaf is named like the tangent of another one"
        problem = found.problem(batch)
        return (None, problem) if problem else (found, "")


def check_arguments(plan: Plan, params: Any, v: Any, batch: Any) -> None:
    """Refuse arguments that do not fit, on this rank.

    Raises:
        TreeError, BatchError: they do not.
    """
    plan.check_tree(params, whole=False)
    plan.check_tree(v, whole=False, what="v")
    check_device(batch, plan.mesh.device)
