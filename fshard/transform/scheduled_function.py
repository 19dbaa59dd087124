"""Functions of parameters and their tangents on schedules, where a trace finds their programs.

The call of a tool runs on a schedule of its own. In a step function it is a pass of that step's.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.scope import SCOPE, bind
from fshard.errors import PlanError, ShardError, TransformError
from fshard.runtime.comm.call_site import in_program
from fshard.runtime.engine.batch import check_device, signature
from fshard.runtime.execution import ProgramTrace, Shard, Shards, held_back
from fshard.runtime.steps import Outcome, PassSpec, Programs, Runner, StepRequest, make_programs
from fshard.runtime.steps.finder import Fn
from fshard.runtime.steps.handshake import NoScheduleError
from fshard.runtime.steps.programs import EngineMaker
from fshard.runtime.steps.step_options import RunOptions
from fshard.schedule.auto import Auto
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import Flat, form_of
from fshard.torch_internals import DispatchModeKey, dispatch_mode
from fshard.training.latest import OneFunction
from fshard.training.metrics import global_result
from fshard.transform.active_transforms import under_way
from fshard.transform.shard_chunks import chunks_of
from fshard.transform.tangent_plan import with_tangents
from fshard.transform.tree_vectors import check_direction

UNTOLD = "parameters lie in host memory, or a leaf is named like the tangent of another one"
"""The reason why a plan has no tangents on schedules."""

PASS = "was a pass of a step function, whose schedule has it: print(step.schedule)"
"""The words for a call that ran as a pass of a step: it has no schedule of its own."""


class ScheduledFunction:
    """A function of a plan with tangents, and of a batch, on one rank.

    Args:
        fn: the function: of a loss, if ``train``, whose gradient is taken.
        plan: the plan as this rank holds it.
        double: the same with tangents.
        running: how it runs.
        call: what ranks call it when they compare their calls.
        train: whether it has a backward.
        accumulate: the parts of a batch.
        told: what else must be equal on all ranks.
        engine: makes the engine; None for the usual one.

    Attributes:
        runner: runs it.
        spec: it as a pass of a step.
    """

    def __init__(
        self,
        fn: Fn,
        plan: Plan,
        double: Plan,
        running: RunOptions,
        call: str,
        train: bool,
        *,
        accumulate: int = 1,
        told: Mapping[str, Any] | None = None,
        engine: EngineMaker | None = None,
    ) -> None:
        self.plan, self.form, self.running, self.engine = plan, form_of(plan), running, engine
        self.spec = PassSpec(fn, double, self._programs, train, accumulate)
        self.programs = self._programs(False)
        self.runner = Runner(fn, self.programs, call)
        self.equal = Equal(plan, {"tool": call, **running.told(), **(told or {})})
        self._trained = [group.id for group in plan.groups if group.trainable]
        self._problems: dict[Hashable, str] = {}

    def _programs(self, debug: bool) -> Programs:
        spec, running = self.spec, self.running.debugged(debug)
        programs = make_programs(spec.plan, running, accumulate=spec.accumulate, train=spec.train)
        return programs if self.engine is None else replace(programs, engine=self.engine)

    def problem(self, batch: Any) -> str:
        """Say why no trace finds a program for batches like this one; empty if one does.

        Raises:
            PlanError: no schedule runs the program in the memory that there is.
            TransformError: no path runs it.
        """
        key = signature(batch)
        if key in self._problems:
            return self._problems[key]
        try:
            with bind(self.plan.mesh, self.plan.data_axes):
                found = self.runner.finder.look(batch)
        except TransformError:
            raise
        except Exception as error:  # the path of transforms raises it again, where it is one of the loss function
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if isinstance(error, ShardError | RuntimeError):
                self._problems[key] = problem
            return problem
        if found is None:
            return "the program depends on values of the batch's tensors"
        self._fits(found)
        self._problems[key] = ""
        return ""

    def _fits(self, found: ProgramTrace) -> None:
        """Refuse a program that no schedule runs in the memory that there is, before anything is sent."""
        if isinstance(self.programs.policy, Auto) and self.programs.policy.memory is not None:
            self.programs.trace(found)

    def run(self, params: Any, directions: Sequence[Any], batch: Any, problem: str = "") -> Outcome:
        """The outcome at parameters and directions, trees of shards that were checked.

        Raises:
            NoScheduleError: on all ranks, if one has a problem, which says why no trace finds its program.
        """

        def refuse() -> None:
            if problem:
                raise NoScheduleError(problem)

        chunks = self.joined(chunks_of(params, self.form), [chunks_of(v, self.form) for v in directions])
        shards = Shards([Shard(chunk.detach(), {}) for chunk in chunks])
        with held_back() as shield, torch.set_grad_enabled(self.spec.train), bind(self.plan.mesh, self.plan.data_axes):
            return self.runner.run(
                StepRequest(batch, shards, shield, refuse=refuse, facts=self.equal.fixed, normed=False)
            )

    def joined(self, at: Mapping[int, Tensor], along: Sequence[Mapping[int, Tensor]]) -> list[Tensor]:
        """The chunks of the plan with tangents, of parameters and directions."""
        chunks = [at[group.id] for group in self.plan.groups]
        return chunks + [each[group] for each in along for group in self._trained]

    def result(self, outcome: Outcome) -> Any:
        """The gradient, a tree of shards; of an evaluation what the function returned, with global means."""
        if self.spec.train:
            return self.gradient(outcome)
        found = global_result(outcome.measured.aux[0], outcome.verdict.means, outcome.verdict.floats)
        return tree.map(lambda x: x.to(self.plan.mesh.device), found)

    def gradient(self, outcome: Outcome, tangents: bool = False) -> dict[str, Any]:
        """The gradient by the parameters, or by their tangents, a tree of shards."""
        homes, first = self.programs.memory.homes, len(self.plan.groups)
        held = range(first, first + len(self._trained)) if tangents else self._trained
        # Copies: the next call overwrites the buffers of this one.
        chunks = {group: homes[at] * outcome.verdict.scale for group, at in zip(self._trained, held, strict=True)}
        return Flat(self.form, chunks | self.form.zero_chunks()).tree()


class Schedules:
    """The scheduled functions of a tool: one for each rank that this process plays.

    Args:
        plan: the plan.
        make: makes the function of a plan, and of the same with tangents.
        tangents: the number of tangents of each leaf.
        trained: whether tangents have gradients, too.
    """

    def __init__(
        self, plan: Plan, make: Callable[[Plan, Plan], ScheduledFunction], tangents: int = 1, trained: bool = False
    ) -> None:
        self.plan, self.make, self.tangents, self.trained = plan, make, tangents, trained
        self._made: dict[int, ScheduledFunction | None] = {}

    @property
    def here(self) -> ScheduledFunction | None:
        """The one of this rank; None where the plan has none."""
        plan = self.plan.here
        rank = plan.mesh.rank
        if rank not in self._made:
            double = with_tangents(plan, self.tangents, self.trained)
            self._made[rank] = None if double is None else self.make(plan, double)
        return self._made[rank]

    def find(self, batch: Any, given: Any) -> tuple[ScheduledFunction | None, str]:
        """The function for a batch and other arguments, and why no trace of this rank finds its program.

        None where the call has no schedule on any rank, and the reason.
        """
        mesh, scope = self.plan.here.mesh, SCOPE.get()
        if mesh.size > 1 and mesh.transport is None:
            return None, "the mesh has no processes"
        if scope is not None and scope.running is not None:
            return None, "no trace finds its program in a step function"
        if dispatch_mode(DispatchModeKey.FAKE) is not None or in_program() or torch.is_inference_mode_enabled():
            return None, "a function that a step runs makes it"
        if under_way([x for x in tree.leaves((batch, given)) if isinstance(x, Tensor)]):
            return None, "a transform is under way"
        if (found := self.here) is None:
            return None, UNTOLD
        return found, found.problem(batch)


class MayBeScheduled(OneFunction):
    """A tool whose calls run on schedules where these are found.

    Attributes:
        plan: the plan.
    """

    plan: Plan
    _schedules: Schedules
    _unscheduled: str = ""

    @property
    def _runner(self) -> Runner:  # type: ignore[override]
        found = self._schedules.here
        if self._unscheduled or found is None:
            how = "gathered where units run, as transforms do, since "
            why = self._unscheduled
            raise PlanError(f"no schedule: the latest call {why if why == PASS else how + (why or UNTOLD)}")
        return found.runner

    def _found(self, batch: Any, *given: Any) -> ScheduledFunction | None:
        """The scheduled function for checked arguments, for ``_outcome``; None if this call has none on any rank."""
        found, self._unscheduled = self._schedules.find(batch, given)
        return found

    def _outcome(
        self, scheduled: ScheduledFunction, params: Any, directions: Sequence[Any], batch: Any
    ) -> Outcome | None:
        """The outcome of a run on a schedule; None if a rank has found none."""
        try:
            return scheduled.run(params, directions, batch, self._unscheduled)
        except NoScheduleError as reason:
            self._unscheduled = str(reason)
            return None

    def _on_schedule(self, params: Any, directions: Sequence[Any], batch: Any) -> Any:
        """The result of a pass of a step function, or of a run on a schedule; None where the call has neither."""
        if (made := self._in_step(params, directions, batch)) is not None:
            return made
        if (scheduled := self._found(batch, params, directions)) is None:
            return None
        outcome = self._outcome(scheduled, params, directions, batch)
        return None if outcome is None else scheduled.result(outcome)

    def _in_step(self, params: Any, directions: Sequence[Any], batch: Any) -> Any:
        """The result of a pass of the step function that makes the call; None where no pass of one can be it."""
        scope = SCOPE.get()
        if scope is None or scope.running is None or in_program("Passes.run", "_traced_in"):
            return None
        if under_way([x for x in tree.leaves((batch, params, directions)) if isinstance(x, Tensor)]):
            return None
        found = (
            None
            if self._schedules.here is None
            else scope.running.derivative(self._schedules.here, params, directions, batch)
        )
        if found is not None:
            self._unscheduled = PASS
        return found


def check_arguments(plan: Plan, params: Any, v: Any, batch: Any) -> None:
    """Refuse arguments that do not fit, on this rank.

    Raises:
        TreeError, BatchError: they do not.
    """
    plan.check_tree(params, whole=False)
    check_direction(plan, v)
    check_device(batch, plan.mesh.device)
