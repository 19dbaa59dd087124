"""What a step function is given and what it returns, with its states apart from all else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fshard import tree
from fshard.arguments import described
from fshard.errors import BatchError
from fshard.parts.running import RunningMemory, Updated
from fshard.state.train_state import TrainState


@dataclass(frozen=True)
class Place:
    """Stands for a state in the arguments of a step."""

    __tree_leaf__: ClassVar[bool] = True
    number: int


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step, with ``Place`` for states.

    Attributes:
        state: its state: any pytree of states.
        batch: its batch.
        states: the states, those in the batch behind the others.
        own: how many of them are not in the batch.
    """

    state: Any
    batch: Any
    states: Sequence[TrainState]
    own: int


def arguments(state: Any, batch: Any) -> Arguments:
    """The arguments of a step, with states apart: nothing that maps over trees may open them."""
    states: list[TrainState] = []

    def place(state: TrainState) -> Place:
        states.append(state)
        return Place(len(states) - 1)

    outside = tree.swap(place, TrainState, state)
    own = len(states)
    return Arguments(outside, tree.swap(place, TrainState, batch), states, own)


@dataclass(frozen=True)
class Final:
    """A state that a step function returns.

    Attributes:
        memory: what holds its parameters before the updates.
        updates: those that nobody has read, in order.
    """

    memory: RunningMemory
    updates: tuple[Updated, ...]


@dataclass(frozen=True)
class Result:
    """What a step function returned.

    Attributes:
        state: the states, as running ones.
        metrics: anything.
        finals: of each state, in order.
        copied: the updates of these whose gradients are copied: the schedule does not keep them for the next step.
    """

    state: Any
    metrics: Any
    finals: tuple[Final, ...]
    copied: tuple[Updated, ...]


def check_data(batch: Any) -> None:
    """Refuse states in the batch of a pass, whose parameters only a pass of their own gathers.

    Raises:
        BatchError: it holds one.
    """
    found: list[TrainState] = []
    tree.swap(found.append, TrainState, batch)
    if found:
        raise BatchError(
            f"the batch of a part holds {len(found)} states, such as {described(found[0])}: give the part tensors "
            f"alone, and states to parts of their own, such as an evaluation whose result is in the batch"
        )
