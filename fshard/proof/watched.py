"""A train step whose gradients and outputs can be inspected."""

from dataclasses import replace

from torch import Tensor

from fshard.errors import PlanError
from fshard.optim.scaling import Scale
from fshard.proof.record import Record, recording
from fshard.runtime.steps.attempt import Outcome
from fshard.runtime.steps.commit import Verdict
from fshard.state.train_state import TrainState
from fshard.training.step import TrainStep


class Watched(TrainStep):
    """A copy of a step, with its graphs, that does not donate the state and keeps gradients and outputs.

    Attributes:
        outputs: the outputs of units.
        seen: the verdict of all ranks.
        divided: the divisor of gradients.
        kept: the sums of gradients by group id; empty with ``update="in_backward"``.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step._runner.fn, step.opt, step.plan, replace(step.options, donate=False))
        theirs, mine = step._runner.workshop, self._runner.workshop
        self.outputs = Record()
        mine.engine, mine.choices = recording(self.outputs), dict(theirs.choices)
        if theirs.cache is not None:
            report = {unit: dict(runs) for unit, runs in theirs.cache.report.items()}
            mine.cache = replace(theirs.cache, graphs=dict(theirs.cache.graphs), report=report)
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
        found = self._runner.seen
        axes = {axis: None for comm in (found.comms if found is not None else ()) for axis in comm}
        over = {axis: self.plan.mesh.shape[axis] for axis in axes if self.plan.mesh.shape[axis] > 1}
        if over:
            raise PlanError(
                f"the loss itself communicates over the axes {over}, so one rank alone cannot compute it by plain "
                f"PyTorch: verify it on a mesh on which these axes have one rank; fs.make_train_step(debug=True) "
                f"compares copies of leaves along them"
            )

    def _check_state(self, state: TrainState) -> None:
        super()._check_state(state)
        self.at = state.step, state.count

    def _check(self, outcome: Outcome, scale: Scale | None) -> Verdict:
        verdict = super()._check(outcome, scale)
        self.seen, self.divided = verdict, outcome.divided
        self.outputs.drop()
        if self.options.policy.update == "deferred":
            self.kept = {group: grad.detach().clone() for group, grad in self._grads.shards.items()}
        return verdict
