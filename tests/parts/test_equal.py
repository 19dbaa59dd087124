"""What parts of a step must have in common on all ranks: differences are told before any state has changed."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from fshard.errors import ReplicationError
from tests.shared.workers import Pools


def made(differs: str) -> tuple[str, bool]:
    """What a step says whose parts, or whose states, differ between ranks; and whether its state is as it was."""
    mesh, whole = fs.make_mesh((2,), ("shard",)), {"w": torch.ones(4), "b": torch.ones(3)}
    plan = fs.make_plan(whole, mesh, [("b", P()), ("w", P("shard"))])

    def pick(name: str, usual: Any, strange: Any) -> Any:
        return strange if name == differs and mesh.rank else usual

    opt = fs.optim.sgd(pick("learning rate", 0.5, 0.1))
    grad = fs.value_and_grad(lambda params, x: (params["w"] * x).sum() + params["b"].sum(), plan)
    update = fs.make_update(opt, plan, clip_norm=pick("clip_norm", 1.0, 2.0))

    def fn(states: Any, batch: Any) -> Any:
        _, grads = grad(states[0], batch)
        state, metrics = update(states[0], grads)
        return (state, states[1]), {"norm": metrics.grad_norm}

    mine = {"w": torch.ones(2), "b": torch.full((3,), pick("params.b", 1.0, 2.0))}
    states = fs.init_state(plan, opt, params=whole), fs.init_state(plan, opt, shards=mine)
    before = tree.map(torch.clone, states[0].params)
    with pytest.raises(ReplicationError) as caught:
        fs.make_step(fn, plan)(states, torch.ones(4))
    same = all(map(torch.equal, tree.leaves(before), tree.leaves(states[0].params)))
    return str(caught.value), same


@pytest.mark.parametrize("differs", ["learning rate", "clip_norm", "params.b"])
def test_what_differs_between_ranks_is_named_on_all(differs: str, pool: Pools) -> None:
    for told, same in pool(2).run(made, differs):
        assert differs in told and same
