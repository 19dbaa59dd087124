"""A train step whose gradients and outputs of units can be inspected."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.errors import PlanError
from fshard.model.unit import Unit
from fshard.runtime.engine.engine import Engine, Sink, Traits
from fshard.runtime.engine.remat_rules import Remat
from fshard.runtime.execution import Update
from fshard.runtime.steps import Outcome, Verdict
from fshard.sharding.plan import Plan
from fshard.state.train_state import TrainState
from fshard.torch_internals import peek_interpreter_stack
from fshard.training.metrics import Metrics, RunReport
from fshard.training.train_step import Asked, TrainStep


class Output(NamedTuple):
    """The output of one call of a unit: its tensors, on the host; ``call`` counts calls in the microbatch."""

    unit: str
    microbatch: int
    call: int
    tensors: tuple[Tensor, ...]


@dataclass
class UnitCalls:
    """The calls of a step on this rank, in order. Another engine, which runs the program again, clears it."""

    calls: list[Output] = field(default_factory=list)
    engine: Any = None

    def note(self, engine: Engine, unit: str, call: int, result: Any) -> None:
        """Keep the output of a call."""
        if engine is not self.engine:
            self.engine = engine
            self.calls.clear()
        microbatch = int(getattr(engine.executor, "microbatch", 0))
        self.calls.append(Output(unit, microbatch, call, tensors_of(result)))

    def drop(self) -> None:
        """Release the engine."""
        self.engine = None


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """Copies of a result's tensors, on the host."""
    found = [x.detach() for x in tree.leaves(result) if isinstance(x, Tensor)]
    return tuple(x.to("cpu", copy=True) for x in found)


class RecordingEngine(Engine):
    """An engine that records the outputs of units."""

    def __init__(self, plan: Plan, sink: Sink, remat: Remat, traits: Traits, record: UnitCalls) -> None:
        super().__init__(plan, sink, remat, traits)
        self.record = record

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the unit and record its output."""
        if self.inside or self.differentiating or peek_interpreter_stack() is not None:
            return super().call(unit, params, args, kwargs)
        result = super().call(unit, params, args, kwargs)
        self.record.note(self, self.units.called(unit, params).name, sum(self.counts.values()) - 1, result)
        return result


class ProofStep(TrainStep):
    """A copy of a step, with its graphs, that does not donate the state and keeps gradients and outputs.

    After a step it holds the verdict of all ranks (``seen``), the divisor of gradients (``divided``) and, but for
    ``update="in_backward"``, the sums of gradients by group id (``kept``).
    """

    def __init__(self, step: TrainStep) -> None:
        self.outputs = UnitCalls()
        programs = step._runner.programs.again(partial(RecordingEngine, record=self.outputs))
        options = replace(step.options, donate=False)
        super().__init__(step._runner.finder.fn, step.opt, step.plan, options, programs)
        self.seen = Verdict((), 0.0, 0.0, 1.0)
        self.divided, self.at = 1.0, (0, 0.0)
        self.kept: dict[int, Tensor] = {}

    @property
    def mean(self) -> float:
        """The factor from sums of gradients to the gradients of the mean."""
        return self._decide.mean(*self.at, self.seen)

    @property
    def carry(self) -> float:
        """The factor from sums of gradients to those carried to a later step."""
        return self._decide.unit(self.seen, self.divided)

    def check_alone(self) -> None:
        """Raise a PlanError with the axes over which the program itself communicates, if there are any."""
        prepared = self._runner.latest.prepared
        axes = [axis for together in (prepared.axes if prepared is not None else ()) for axis in together]
        over = {axis: self.plan.mesh.shape[axis] for axis in axes if self.plan.mesh.shape[axis] > 1}
        if over:
            raise PlanError(
                f"the loss itself communicates over the axes {over}, so one rank alone cannot compute it by plain "
                f"PyTorch: verify it on a mesh on which these axes have one rank; fs.make_train_step(debug=True) "
                f"compares copies of leaves along them"
            )

    def _accept(self, state: TrainState) -> None:
        super()._accept(state)
        self.at = state.step, state.count

    def _conclude(
        self, state: TrainState, update: Update, outcome: Outcome, asked: Asked, ran: RunReport
    ) -> tuple[TrainState, Metrics]:
        self.seen, self.divided = outcome.verdict, outcome.divided
        self.outputs.drop()
        if self.options.running.policy.update != "in_backward":
            self.kept = {group: grad.detach().clone() for group, grad in self._decide.grads.shards.items()}
        return super()._conclude(state, update, outcome, asked, ran)
