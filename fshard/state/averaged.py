"""A state for evaluation whose parameters are the average that the optimizer keeps of them."""

from fshard.arguments import expect
from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import TreeError
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, enter
from fshard.runtime.execution import Shard, Shards
from fshard.runtime.memory import same_memory
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState


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

    >>> import torch
    >>> import fshard as fs
    >>> opt, params = fs.optim.ema(fs.optim.sgd(0.1), 0.9), {"w": torch.ones(2)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> averaged(fs.init_state(plan, opt, params=params)).params
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
