"""The entries of a train state: what a checkpoint must hold, as data, and a state from entries that were filled.

Whoever writes, reads, converts or compares states works on entries and needs to know nothing of groups, shards or
optimizers. Whoever adds a piece of state adds it here: tensors in ``entries``, plain numbers in ``scalars``.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fshard.errors import StateError
from fshard.optim.base import Optimizer
from fshard.optim.scaling import Scale
from fshard.runtime.execution import Shard, Shards, start_shard
from fshard.runtime.memory import memory_space
from fshard.sharding.plan import Plan
from fshard.state.exchanges import ANCHOR, Exchanges
from fshard.state.fit import check_optimizer
from fshard.state.pieces import PARAMS, Entry, entries_of
from fshard.state.provenance import Past
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState

LATE = "late."
"""What the names of scalars begin with that tell when a leaf began to train."""

SUMMED = "residual_of_sums"
"""The name of ``TrainState.summed``."""

CARRIED = "carried_count"
"""The name of the number of elements whose gradients ``fs.optim.every`` carries as a sum. Older states have ``count``
instead, and carry that sum over a number of parts that they do not hold."""

EXCHANGES = "exchanges"
"""The name of what replicas that train apart exchange, and when; states of older versions do not say."""

Scalars = dict[str, int | float | bool | str | None]
"""What a state holds beside tensors, equal on all ranks."""


def entries(state: TrainState, unpacked: Container[str] = ()) -> list[Entry]:
    """The entries of a state as this rank holds it: parameters in the order of the tree, then the optimizer's state.

    Local. Every rank lists the same names in the same order. An update that waits is applied first. A packed leaf has
    two entries, its codes and its scales; one whose path is in ``unpacked`` has one, a copy of its values.

    Raises:
        DonatedError: the state was donated to a step.
        StateError: other ranks have updated some of its parameters, and it was not settled.
        TreeError: the optimizer keeps something that no entry can describe.
    """
    return entries_of(state.plan, state.finished(), unpacked)


def scalars(state: TrainState) -> Scalars:
    """Return what a state holds beside tensors.

    Step, seed, loss scale, what is carried, who began late, what is exchanged.
    """
    out: Scalars = {"step": state.step, "seed": state.seed}
    if state.count:
        out |= {CARRIED: state.count}
    out |= {LATE + path: late for path, late in state.late.items()}
    out |= {} if state.summed is None else {SUMMED: state.summed}
    out |= {} if state.past.exchanges is None else {EXCHANGES: state.past.exchanges.text}
    return out if state.scale is None else out | {"loss_scale": state.scale.value, "loss_scale_good": state.scale.good}


def assemble(
    plan: Plan,
    opt: Optimizer | None,
    fill: Callable[[Entry], None],
    values: Mapping[str, Any],
    past: Past | None = None,
) -> TrainState:
    """A state from its entries: the inverse of ``entries`` and ``scalars``. Local.

    Args:
        plan: where leaves live.
        opt: the optimizer, which says what it keeps; None for parameters alone.
        fill: called with each entry in turn, writes to ``entry.tensor``. What it leaves alone stays as ``opt.init``
            made it, and zero in parameters.
        values: as ``scalars`` gave them.
        past: where it comes from.

    Raises:
        StateError: gradients are carried in units that only the run that saved them knew.
    """
    if values.get("count"):
        raise _unknown_units(int(values["step"]))
    made = None if opt is None else check_optimizer(plan, opt)
    shards = []
    for group in plan.groups:
        shards.append(Shard(memory_space(group.kinds.param, plan.mesh).zeros(*group.kept), {}))
    for entry in entries(TrainState(plan, 0, 0, StateMemory(plan, Shards(shards)))):
        fill(entry)
    if made is not None:
        # What starts from the parameters, such as an average of them, starts from these.
        shards = [start_shard(group, plan.mesh, made, shards[group.id].param) for group in plan.groups]
    scale, count = None, float(values.get(CARRIED, 0.0))
    if values.get("loss_scale") is not None:
        scale = Scale(float(values["loss_scale"]), int(values.get("loss_scale_good", 0)))
    trained = [path for path, leaf in plan.leaves.items() if leaf.trainable and opt is not None]
    late = {path: int(values[LATE + path]) for path in trained if values.get(LATE + path)}
    memory, past = StateMemory(plan, Shards(shards)), replace(past or Past(), exchanges=_exchanges(values, shards))
    summed = values.get(SUMMED)
    state = TrainState(plan, int(values["step"]), int(values["seed"]), memory, scale, count, late, past, summed)
    for entry in _beside(state):
        fill(entry)
    return state


def _exchanges(values: Mapping[str, Any], shards: Sequence[Shard]) -> Exchanges | None:
    """Return what replicas exchange when, if the state still has what it takes."""
    apart = any(ANCHOR in shard.opt for shard in shards)
    return Exchanges.read(values[EXCHANGES]) if apart and values.get(EXCHANGES) is not None else None


def _beside(state: TrainState) -> list[Entry]:
    """The entries of the optimizer's state."""
    return [entry for entry in entries(state) if not entry.name.startswith(PARAMS)]


def _unknown_units(step: int) -> StateError:
    """A state of a version whose carried gradients depend on ranks and microbatches."""
    return StateError(
        f"the state of step {step} carries gradients of fs.Mean between two updates of fs.optim.every, as older "
        f"versions saved them: divided by data ranks times accumulate=, which are not known here. Restore a checkpoint "
        f"of a step that has updated, or make the next update with the version that saved it"
    )
