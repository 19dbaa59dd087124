"""Complete states: the one way to settle one that needs other ranks, and the averages that an optimizer keeps."""

import torch

from fshard.arguments import expect
from fshard.collectives import raw
from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import TreeError
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, each_rank_or_raise, enter, mesh_communicator, telling
from fshard.runtime.comm.packing import packed
from fshard.runtime.execution import Shard, Shards
from fshard.runtime.execution.wires import add_rows
from fshard.runtime.memory import same_memory
from fshard.sharding.mesh import Mesh
from fshard.sharding.wire import WireFormat
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState


@called_on_each_rank
def settle(state: TrainState) -> TrainState:
    """Complete a state: apply the update that waits, and fetch what other ranks have updated. Collective.

    Reading a state never communicates. Most plans need no call: each rank updates all that it holds. Where
    ``fs.Rule(..., opt=)`` cuts optimizer state further than parameters, ranks update parts of what they share, and the
    next step exchanges these behind its forward. To read ``state.params`` before that, settle the state on all ranks.
    Evaluation, checkpoints and exports, which are collective, do it themselves.

    Args:
        state: the state. Its value stays the same.

    Returns:
        The state itself. Each of its parts can be read now.

    Raises:
        DonatedError: the state was donated to a step.
        ScheduleError: ranks are at different calls, on all of them alike.
        StateError: the update failed half-way on a rank; the same error on all of them.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.settle(fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(2)})).params
    {'w': tensor([1., 1.])}
    """
    expect("settle(state)", [("state", state, TrainState, "what a step returned")])
    shared = any([group.opt_parts > 1 for group in state.plan.groups])  # else no rank waits for another
    with telling(state.plan.mesh if shared else None, always=False):
        return complete(state, state.plan.mesh)


def complete(state: TrainState, mesh: Mesh) -> TrainState:
    """Settle a state over a mesh that its ranks share; a state that was pickled has only an abstract one."""
    stale = state.stale
    if not stale:
        state.applied()
        return state
    enter(mesh, "settle")
    shards = each_rank_or_raise(mesh_communicator(mesh), state.applied)
    for group in list(stale):
        layout = state.plan.groups[group]
        fetch(shards[group], Ranks(mesh, layout.opt_axes), layout.wires.get("update_gather"))
        del stale[group]
    return state


def fetch(shard: Shard, ranks: Ranks, form: WireFormat | None = None) -> None:
    """Fetch what these ranks have updated of a shard, in a wire format or exactly. Collective."""
    with torch.no_grad():
        if form is not None:
            sent = packed(shard.own - shard.held, form)
            rows = raw.gather(ranks, sent)() if ranks.size > 1 else sent
            add_rows(rows.reshape(ranks.size, -1), form, shard.param)
            return
        shard.param.copy_(apply(shard.own.to(ranks.mesh.device), Collect(ranks, -1)))


@called_on_each_rank
@collective_call
def averaged(state: TrainState, name: str = "ema") -> TrainState:
    """The state with averaged parameters, for eval steps. Local: each rank has the average of what it holds.

    Where ranks update a part of what they hold (``fs.Rule(..., opt=)``), it is collective: the parts are exchanged.

    Args:
        state: a state of an optimizer that keeps an average, ``fs.optim.ema(opt, decay)``.
        name: what the average is called.

    Returns:
        A state of its own memory, without optimizer state, so for eval steps alone. Leaves of which there is no
        average, such as frozen ones, are as they are.

    Raises:
        TreeError: the state holds no such average.
        DonatedError: the state was donated to a step.

    >>> opt, params = fs.optim.ema(fs.optim.sgd(0.1), 0.9), {"w": torch.ones(2)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.averaged(fs.init_state(plan, opt, params=params)).params
    {'w': tensor([1., 1.])}
    """
    expect("averaged(state)", [("state", state, TrainState, "what a step returned")])
    plan, shards = state.plan, []
    if not any(name in shard.layouts for shard in state.applied()):
        kept = list(dict.fromkeys(kept for shard in state.applied() for kept in shard.layouts))
        raise TreeError(
            f"the state holds {kept} of the optimizer and no {name!r}: train with fs.optim.ema(opt, decay) around opt"
        )
    enter(plan.mesh, "averaged")
    for group, shard in zip(plan.groups, state.applied(), strict=True):
        own, layout = same_memory(shard.own.detach()), shard.layouts.get(name)
        part = plan.mesh.index(group.owned.gather_axes)
        for number, (begin, end) in layout.ranges.items() if layout is not None else ():
            first, last = group.owned.shard_range(number, part)
            own[first:last] = shard.opt[name][begin:end]
        if group.trainable and group.opt_parts > 1:
            own = apply(own, Collect(Ranks(plan.mesh, group.opt_axes), -1))
        shards.append(Shard(own, {}))
    return TrainState(plan, state.step, state.seed, StateMemory(plan, Shards(shards)), past=state.past)
