"""State, evaluations and records beside the steps of a train loop."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

from fshard.arguments import described
from fshard.errors import CheckpointWarning, PlanError
from fshard.runtime.comm import telling
from fshard.state.train_state import TrainState
from fshard.tracking.track import Track, track
from fshard.tracking.tracker import Tracker
from fshard.training.metrics import Metrics
from fshard.training.train_step import TrainStep


class Extra:
    """The user's state in the checkpoints of a loop.

    Args:
        given: a dict, which is changed in place; an object with ``state_dict`` and ``load_state_dict``; or None.

    Raises:
        PlanError: it is something else.

    >>> tokens = {"tokens": 5}
    >>> saved = Extra(tokens).saved()
    >>> tokens["tokens"] = 0
    >>> Extra(tokens).restore(saved)
    >>> tokens
    {'tokens': 5}
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        both = callable(getattr(given, "state_dict", None)) and callable(getattr(given, "load_state_dict", None))
        if given is not None and type(given) is not dict and not both:
            raise PlanError(
                f"train_loop(extra=) is {described(given)}: give a dict of JSON values, such as {{'tokens': 0}}, or an "
                f"object with state_dict() and load_state_dict(state)"
            )

    def saved(self) -> dict[str, Any]:
        """The part of a checkpoint's data that holds it."""
        if self.given is None:
            return {}
        state = self.given if type(self.given) is dict else self.given.state_dict()
        return {"extra": copy.deepcopy(state)}  # an asynchronous save may write it while the loop goes on

    def restore(self, data: Any) -> None:
        """Take the values of a checkpoint. A warning says if it has none, or if nobody takes them."""
        known = isinstance(data, dict) and "extra" in data
        if known and self.given is None:
            warnings.warn(
                "the checkpoint holds extra state, and train_loop was given none: pass extra=, or the next checkpoints "
                "will lack it",
                CheckpointWarning,
                stacklevel=5,
            )
        elif self.given is not None and not known:
            warnings.warn(
                "the checkpoint was saved without extra=: it begins as it was given", CheckpointWarning, stacklevel=5
            )
        elif known and type(self.given) is dict:
            self.given.clear()
            self.given.update(data["extra"])
        elif known:
            self.given.load_state_dict(data["extra"])


class Recorder:
    """Evaluates now and then, and gives trackers a row a step. A context manager.

    Args:
        to: trackers, which are closed at the end; or what ``fs.track`` made, which stays open.
        step: the train step.
        steps: the last step.
        evaluate: a function of the state.
        every: the number of steps between two evaluations.

    Raises:
        PlanError: arguments that do not go together.
    """

    def __init__(
        self,
        to: Track | Sequence[Tracker] | None,
        step: TrainStep,
        steps: int,
        evaluate: Callable[[TrainState], Any] | None,
        every: int | None,
    ) -> None:
        if evaluate is not None and not callable(evaluate):
            raise PlanError(f"train_loop(evaluate=) is {described(evaluate)}: give a function of the state")
        if evaluate is not None and to is None:
            raise PlanError("train_loop(evaluate=) goes to trackers, in the row of the step: give track= as well")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise PlanError(f"train_loop(evaluate_every={every!r}): give an int >= 1, or None for the last step alone")
        if every is not None and evaluate is None:
            raise PlanError(f"train_loop(evaluate_every={every}): give evaluate= as well, a function of the state")
        self.own = not isinstance(to, Track)
        self.to = track(to, step) if to is not None and not isinstance(to, Track) else to
        self.mesh, self.steps, self.evaluate, self.every = step.plan.mesh, steps, evaluate, every

    def record(self, state: TrainState, metrics: Metrics) -> None:
        """Record a step."""
        more = None
        if self.evaluate is not None and (state.step == self.steps or self.every and state.step % self.every == 0):
            with telling(self.mesh):  # the others come to the evaluation
                more = self.evaluate(state)
        if self.to is not None:
            self.to(state.step, metrics, more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.own and self.to is not None:
            self.to.close()
