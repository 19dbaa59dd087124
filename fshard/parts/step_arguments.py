"""The arguments and results of a step function, with its states apart from all else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import BatchError, LossError, PlanError, TreeError
from fshard.parts.step_values import RunningMemory, Updated
from fshard.parts.update_metrics import UpdateMetrics
from fshard.sharding.mesh import Mesh
from fshard.state.flat import mark_of
from fshard.state.train_state import TrainState


@dataclass(frozen=True)
class ArgumentPlace:
    """Stands for a state in the arguments of a step."""

    __tree_leaf__: ClassVar[bool] = True
    number: int


@dataclass(frozen=True, eq=False)
class Held:
    """Stands for a leaf of a tree of shards in the batch of a step: it has no rows."""

    __tree_leaf__: ClassVar[bool] = True
    leaf: Tensor


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step, with ``ArgumentPlace`` for states, and ``Held`` for shards.

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

    def opened(self) -> Any:
        """The batch with the shards themselves."""
        return tree.swap(lambda held: held.leaf, Held, self.batch)

    def filled(self, one: Callable[[int], Any]) -> tuple[Any, Any]:
        """Return what the function is given, with ``one(number)`` for each state."""

        def place(at: ArgumentPlace) -> Any:
            return one(at.number)

        return tree.swap(place, ArgumentPlace, self.state), tree.swap(place, ArgumentPlace, self.opened())


def arguments(state: Any, batch: Any) -> Arguments:
    """The arguments of a step, with states apart: nothing that maps over trees may open them."""
    states: list[TrainState] = []

    def place(state: TrainState) -> ArgumentPlace:
        states.append(state.here)
        return ArgumentPlace(len(states) - 1)

    def held(value: TrainState | Tensor) -> Any:
        if isinstance(value, TrainState):
            return place(value)
        return value if mark_of(value) is None else Held(value)

    outside = tree.swap(place, TrainState, state)
    own = len(states)
    return Arguments(outside, tree.swap(held, (TrainState, Tensor), batch), states, own)


@dataclass(frozen=True)
class Final:
    """A state that a step function returns.

    Attributes:
        memory: what holds its parameters before the updates.
        updates: those that nobody has read, in order.
    """

    memory: RunningMemory
    updates: tuple[Updated, ...]


def final_of(memory: RunningMemory) -> Final:
    """A state that a step function returns, of its memory.

    Raises:
        TreeError: two updates of a leaf.
    """
    updates: list[Updated] = []
    while isinstance(memory.source, Updated):
        updates.insert(0, memory.source)
        memory = memory.source.before
    seen: set[str] = set()
    for updated in updates if len(updates) > 1 else ():
        if twice := seen & set(updated.part.paths):
            raise TreeError(
                f"the step updates {sorted(twice)[0]} and {len(twice) - 1} more leaves twice with gradients of the "
                f"same parameters: add the gradients up first, fs.tree.add, or take the second ones of the state "
                f"that the first update returned"
            )
        seen |= set(updated.part.paths)
    return Final(memory, tuple(updates))


@dataclass(frozen=True)
class FunctionResult:
    """The values that a step function returned.

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


def check_mesh(what: str, mesh: Mesh, other: Mesh) -> None:
    """Refuse what lies on another mesh than the step: parts of a step share communicators.

    Args:
        what: lies there.
        mesh: of the step.
        other: where it lies.

    Raises:
        PlanError: they are two objects, be they equal or not.
    """
    if other == mesh and other is not mesh:
        raise PlanError(
            f"{what} and the step lie on two meshes, which are equal, {mesh}, but have communicators of their own: "
            f"make one mesh, and give it to all plans of the step"
        )
    if other is not mesh:
        raise PlanError(f"{what} lies on {other}, and the step on {mesh}: make all plans of a step on one mesh")


def returned_states(returned: Any) -> list[TrainState]:
    """The states that a step function returned.

    Raises:
        LossError: no pair of states and metrics.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise LossError(
            f"the step function returned {described(returned)}: return (state, metrics), as a train step does"
        )
    if _has_metrics(returned[0]):
        raise LossError(
            "the step function returned metrics of an update among its states: an update returns both, so unpack them, "
            "state, metrics = update(state, grads)"
        )
    found: list[TrainState] = []
    tree.swap(found.append, TrainState, returned[0])
    return found


def _has_metrics(states: Any) -> bool:
    """Tell whether metrics of an update lie among states."""
    held = states.values() if isinstance(states, dict) else states if isinstance(states, (list, tuple)) else ()
    return isinstance(states, UpdateMetrics) or any(map(_has_metrics, held))


def check_origins(origins: Sequence[int], own: int) -> None:
    """Refuse a step function that does not return each of its states once.

    Args:
        origins: the numbers of the states that those which it returned were made of.
        own: how many it was given to update.

    Raises:
        LossError: naming the states.
    """
    if not origins:
        raise LossError("the step function returned no state: return (state, metrics)")
    wrong = [f"state {number} of the batch" for number in origins if number >= own]
    wrong += [f"state {number}, twice" for number in sorted(set(origins)) if origins.count(number) > 1]
    if len(origins) != own or wrong:
        told = ", ".join(wrong) or f"{len(origins)} states"
        raise LossError(
            f"the step function returned {told}, and was given {own} to update: return each of them once; "
            f"states in the batch are only read"
        )


def check_data(batch: Any) -> None:
    """Refuse states in the batch of a pass, whose parameters only a pass of their own gathers, and shards.

    Raises:
        BatchError: it holds one.
    """
    found: list[TrainState] = []
    shards: list[Tensor] = []
    tree.swap(lambda x: (found if isinstance(x, TrainState) else shards).append(x), (TrainState, Tensor), batch)
    if any([mark_of(shard) is not None for shard in shards]):
        raise BatchError(
            "the batch of a part holds leaves of a tree of shards, and each rank has other elements of it: give the "
            "tree to the part in the place of the state, or add to it outside of the loss with fs.tree.add"
        )
    if found:
        raise BatchError(
            f"the batch of a part holds {len(found)} states, such as {described(found[0])}: give the part tensors "
            f"alone, and states to parts of their own, such as an evaluation whose result is in the batch"
        )
