"""Running a step function part by part, where no trace finds its schedule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fshard import tree
from fshard.collectives.scope import cutting
from fshard.errors import CommError, PeerError, ScheduleError
from fshard.parts.leaf_ages import after_call, trained_leaves
from fshard.parts.returned_values import exchanged
from fshard.parts.step_arguments import Arguments, check_origins, returned_states
from fshard.parts.step_values import PART, not_of_the_step
from fshard.runtime.comm import Communicator, digest, mesh_communicator
from fshard.runtime.comm.calls import announce
from fshard.runtime.engine.rng import seeded
from fshard.runtime.steps import raise_failure
from fshard.runtime.steps.consensus import CUT, FAILED, OK
from fshard.runtime.steps.handshake import END, different_schedules
from fshard.sharding.plan import Plan
from fshard.state.settle import complete
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState

LEARNED = PeerError | ScheduleError | CommError
"""What a rank raises in a part where another rank has failed. If all ranks are lost, so is the end of the step."""


def piecewise(fn: Callable[..., Any], plan: Plan, given: Arguments, donate: bool) -> tuple[Any, Any]:
    """Run a step function on states that share the memory of these, each part with exchanges of its own.

    Updates that parts read are applied to copies, so that a failure leaves every state as it was.

    Args:
        fn: the function.
        plan: a plan on the mesh, whose data axes are those of the batch.
        given: its arguments.
        donate: whether the step takes their memory.
    """
    mesh = plan.mesh
    failure, returned = None, None
    try:
        lent = [_lent(complete(state, mesh), number) for number, state in enumerate(given.states)]
        state, batch = given.filled(lent.__getitem__)
        # A rank that fails between parts ends the waits of others in collectives, as one that fails in a part does.
        with cutting(mesh), seeded(lent[0].seed, lent[0].step, mesh.index(plan.data_axes), mesh.device):
            returned = fn(state, batch)
            _check_returned(returned, given.own, lent)
    except BaseException as error:
        failure = error
    with cutting(mesh):  # all ranks continue with new communicators
        _end(mesh_communicator(mesh), failure)
    assert returned is not None
    metrics = exchanged(mesh_communicator(mesh), returned[1])
    return tree.swap(lambda state: _kept(state, given.states, donate), TrainState, returned[0]), metrics


def _end(control: Communicator, failure: BaseException | None) -> None:
    """Meet all other ranks at the end of the step. Collective.

    A rank that fails between two parts comes here while others are at a part. They learn of it there, fail too, and
    come here with that.

    Raises:
        BaseException: the failure of this rank, or what another rank says of its own.
    """
    if control.size == 1:
        if failure is not None:
            raise failure
        return
    all_here = False
    while not all_here:
        all_here, failure = _met(control, failure)


def _met(control: Communicator, failure: BaseException | None) -> tuple[bool, BaseException | None]:
    """Meet the other ranks once: whether all of them are at the end of the step, and what this rank has failed with.

    Raises:
        BaseException: all of them are, and one has failed.
    """
    # A rank that only learned of a failure raises what the rank says that failed by itself.
    own = OK if failure is None else CUT if isinstance(failure, LEARNED) else FAILED
    try:
        rows = announce(control, PART, [own, END.number, digest(()), -1, 0])
    except (ScheduleError, PeerError) as error:  # others are at a part that has a name of its own, or refuse it
        return False, failure or error
    status, all_here = [row[0] for row in rows], all([row[1] == END.number for row in rows])
    try:
        if any(status):
            raise_failure(control, failure, status, own)
        if not all_here:
            raise different_schedules(control, END)
    except BaseException as error:
        if all_here:
            raise
        return False, failure or (error if isinstance(error, LEARNED) else None)
    return all_here, failure


def _lent(state: TrainState, number: int) -> TrainState:
    """A state on the memory of another, which stays as it is."""
    memory = StateMemory(state.plan, state.shards())
    memory.lent, memory.origin, memory.compared = True, number, state.memory.compared
    return replace(state, memory=memory)


def _kept(state: TrainState, given: Sequence[TrainState], donate: bool) -> TrainState:
    """A state that owns its memory: that of the state which it came from, or a copy."""
    memory, before = state.memory, given[state.memory.origin or 0]
    step, late = after_call(before.step, state.step, state.late, trained_leaves(state.plan))
    if not memory.lent:
        memory.origin = None
    else:
        shards = state.shards() if donate else state.shards().clone()
        memory = StateMemory(state.plan, shards, memory.pending, memory.stale)
    if donate:
        before.memory.donate(memory)
    return replace(state, step=step, late=late, memory=memory)


def _check_returned(returned: Any, own: int, lent: Sequence[TrainState]) -> None:
    """Refuse what a step function must not return.

    Raises:
        LossError, TreeError: as ``returned_states`` and ``check_origins``; a state that is not of this step, or whose
            parameters were written to.
    """
    found = returned_states(returned)
    for state in (*lent, *found):
        state.memory.check_unwritten()
    for state in found:
        if state.memory.origin is None:
            raise not_of_the_step(state)
    check_origins([state.memory.origin for state in found if state.memory.origin is not None], own)
