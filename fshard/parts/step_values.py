"""Values inside of a step function: states, trees of shards and numbers that know the step that runs.

What is asked of them is done when it must be: a gradient that nobody reads is still on its way while the next pass
computes, an update that nobody reads waits for the next step, and a loss that nobody reads is exchanged at the end of
the step with all other numbers. So a step function that only hands values on is as fast as a train step, and one that
computes with them is as right.
"""

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.collectives.scope import SCOPE
from fshard.errors import StateError, TreeError
from fshard.optim.contract import LearningRate
from fshard.runtime.engine.proxies import METADATA, PLACE
from fshard.sharding.plan import Plan
from fshard.state.flat import Flat, FlatForm, mark_of
from fshard.state.train_state import TrainState
from fshard.torch_internals import DisableTorchFunctionSubclass, disable_current_modes

PART = "part of a step"
"""What ranks call a part when they compare their calls. They compare which part it is besides."""


class RunningStep(ABC):
    """A step function that is traced, or runs on a schedule: what its values ask it for."""

    @abstractmethod
    def chunks(self, flat: "RunningFlat") -> Mapping[int, Tensor]:
        """The chunks of a tree of this step, as they are when all that fills them is over."""

    @abstractmethod
    def apply(self, memory: "RunningMemory") -> None:
        """Apply an update that somebody reads, to copies of what it updates."""

    @abstractmethod
    def replaced(self, memory: "RunningMemory", params: Any) -> "RunningMemory":
        """A state of this step with other parameters."""

    @abstractmethod
    def given_chunks(self, state: int) -> Mapping[int, Tensor]:
        """The shards of the parameters of a state that the step was given."""

    @abstractmethod
    def number(self, value: "Number") -> Tensor:
        """The value of a number of this step, now."""

    def hand_out(self, leaf: Tensor, flat: "RunningFlat", number: int) -> None:  # noqa: B027
        """Note that code between the parts gets a leaf of a tree. A run need not: its trace has noted it."""


def running_of(given: Any) -> Any:
    """The step function that this state or tree belongs to, or that is under way; None outside of one."""
    if isinstance(given, TrainState):
        return getattr(given.memory, "running", None)
    while isinstance(given, Mapping) and given:
        given = next(iter(given.values()))
    flat = mark_of(given)
    if isinstance(flat, RunningFlat):
        return flat.running
    scope = SCOPE.get()  # a tree that its code has made by itself carries no mark
    return None if scope is None else scope.running


class Later(Tensor):
    """A tensor whose value is asked for when an operation reads it. Its shape and dtype are there before."""

    current: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions of shape and place; else run the operation on values."""
        if func in METADATA or func in PLACE:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree.mapped(current, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on values, where a transform of ``torch.func`` has wrapped the tensor."""
        args, kwargs = tree.mapped(current, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<a tensor of a step that runs: {list(self.shape)}>"


def later(like: Tensor, device: torch.device, value: Callable[[], Tensor]) -> Tensor:
    """A tensor like one without data, whose value the function returns. A trace makes it outside of its mode."""
    made: Later = Tensor._make_wrapper_subclass(Later, like.shape, like.stride(), dtype=like.dtype, device=device)
    made.current = value
    return made


@functools.cache
def _scalar(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def current(value: Any) -> Any:
    """The value of a tensor that is asked for now; other values as they are."""
    return value.current() if isinstance(value, Later) else value


@dataclass(frozen=True, eq=False)
class Number:
    """A number that all ranks learn together: a loss, an auxiliary mean, a gradient norm.

    Attributes:
        kind: ``"loss"``, ``"mean"``, ``"norm"``, or ``"skipped"``: whether an update does not happen.
        of: the pass, or the update.
        at: which of the auxiliary means.
        dtype: of its tensor.
    """

    kind: str
    of: Any
    at: int
    dtype: torch.dtype

    def tensor(self, running: RunningStep) -> Tensor:
        """It as a tensor of the step."""
        with disable_current_modes():
            made = later(_scalar(self.dtype), torch.device("cpu"), lambda: running.number(self))
        made._fshard_number = self  # type: ignore[attr-defined]
        return made


def number_of(value: Any) -> Number | None:
    """The number behind a tensor."""
    return getattr(value, "_fshard_number", None) if isinstance(value, Later) else None


ALONE = 2
"""References to a leaf that nobody else holds, as ``sys.getrefcount`` counts them: the list's, and the argument's."""


class RunningFlat(Flat):
    """A tree of shards of a step that runs. Its leaves ask for their values when they are read."""

    over = False
    """Whether the step is over whose tree it was."""

    def __init__(self, running: RunningStep, form: FlatForm, chunks: Mapping[int, Tensor]) -> None:
        super().__init__(form, chunks)
        self.running = running

    @property
    def kept(self) -> bool:
        """Tell whether somebody beside it holds a leaf that it has handed out."""
        leaves = self.__dict__.get("leaves", ())
        return bool(leaves) and max(map(sys.getrefcount, leaves)) > ALONE

    @property
    def chunks(self) -> Mapping[int, Tensor]:
        """The chunks, once all that fills them is over."""
        return self.running.chunks(self)

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        """A tensor for each leaf, whose value is asked for when it is read."""
        device = self.form.plan.mesh.device
        with disable_current_modes():  # a trace would make them fake tensors
            likes = enumerate(self.form.likes)
            return self.marked([later(like, device, functools.partial(self._leaf, n)) for n, like in likes])

    def _leaf(self, number: int) -> Tensor:
        group, begin, end, shape = self.form.places[number]
        leaf = self.chunks[group][begin:end].view(shape)
        self.running.hand_out(leaf, self, number)
        return leaf

    def made(self, chunks: Mapping[int, Tensor]) -> "Flat":
        """Return what arithmetic on this tree makes."""
        return ComputedFlat(self.running, self.form, chunks)


class StateParams(RunningFlat):
    """The parameters of a state that the step was given.

    Attributes:
        state: its number among them.
    """

    def __init__(self, running: RunningStep, form: FlatForm, state: int) -> None:
        super().__init__(running, form, {})
        self.state = state

    @property
    def held(self) -> Mapping[int, Tensor]:
        """The chunks as they lie."""
        return self.running.given_chunks(self.state)


class Bank(RunningFlat):
    """The gradients of a pass.

    Attributes:
        number: of the pass.
    """

    def __init__(
        self,
        running: RunningStep,
        form: FlatForm,
        chunks: Mapping[int, Tensor],
        number: int,
        passing: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(running, form, chunks)
        self.number, self.passing = number, passing


class ComputedFlat(RunningFlat):
    """Shards that arithmetic in the step has made."""


@dataclass(frozen=True, eq=False)
class Updated:
    """Parameters that an update in the step makes, when somebody reads them.

    Attributes:
        before: the memory of the state that it updates.
        part: the update.
        grads: the gradients.
        state: the state as the update was given it.
        lr: the learning rate, if it is not the optimizer's own.
    """

    before: "RunningMemory"
    part: Any
    grads: Flat
    state: TrainState
    lr: LearningRate = None


class RunningMemory:
    """The memory of a state inside of a step function.

    Attributes:
        running: the step.
        plan: the plan.
        source: the parameters, or the update that makes them.
        origin: the number of the state, of those that the step was given.
        shards_made: the shards, with the optimizer's state, that the step has made; None for those of that state.
    """

    def __init__(self, running: RunningStep, plan: Plan, source: "RunningFlat | Updated", origin: int) -> None:
        self.running, self.plan, self.source, self.origin = running, plan, source, origin
        self.donated, self.compared, self.lent = False, True, False
        self.pending, self.stale = None, dict[int, None]()
        self.shards_made: Any = None

    def params(self, step: int, *, stale: bool = False) -> Any:
        """The tree of parameters."""
        return self.flat().tree()

    def flat(self) -> RunningFlat:
        """The parameters: an update that waits is applied, to copies."""
        if isinstance(self.source, Updated):
            self.running.apply(self)
        assert isinstance(self.source, RunningFlat)
        return self.source

    def with_params(self, step: int, params: Any) -> "RunningMemory":
        """The memory of the same state with other parameters."""
        return self.running.replaced(self, params)

    def check_unwritten(self) -> None:
        """Nothing can be written to it."""

    def note_compared(self) -> None:
        """Ranks have compared what they hold copies of before the step began."""

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StateError(
            "inside of a step function a state has parameters, and goes to parts of the step: fs.value_and_grad, "
            "fs.make_update, fs.make_eval_step. Read its optimizer state, copy, save or settle the state that the step "
            "returns"
        )

    opt_state = shards = applied = whole = layout = clone = donate = _refused


def with_memory(state: TrainState, memory: Any, **changes: Any) -> TrainState:
    """A state with another memory."""
    return replace(state, memory=memory, **changes)


def memory_of(state: Any, running: RunningStep) -> RunningMemory:
    """The memory of a state of this step.

    Raises:
        TreeError: it is not a state of this step.
    """
    memory: Any = getattr(state, "memory", None)
    if not isinstance(memory, RunningMemory) or memory.running is not running:
        raise not_of_the_step(state)
    return memory


def not_of_the_step(state: Any) -> TreeError:
    """A step function uses or returns a state that the step was not given."""
    return TreeError(
        f"{described(state)} is not a state of the step that runs: pass it to the step, as its state or in the batch, "
        f"and not in a closure; a step function returns the states that it was given, updated"
    )
