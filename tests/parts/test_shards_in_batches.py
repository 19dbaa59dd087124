"""Trees of shards in the batch of a step: they have no rows, and come back from metrics as trees."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.parts.plain import batch, first, local, plan_on, whole

OPT = fs.optim.sgd(0.05)


def momentum(asks: bool) -> list[list[float]]:
    """On a rank: steps that carry a tree of shards from their metrics to their batch."""
    mesh = fs.make_mesh((-1,), ("shard",))
    plan, told = plan_on(mesh), []
    grad, update = fs.value_and_grad(first, plan), fs.make_update(OPT, plan)

    def fn(state: Any, given: Any) -> Any:
        loss, grads = grad(state, given["rows"])
        if asks:
            assert loss < 1e9
        speed = fs.tree.add(grads, given["speed"], 0.9)
        state, metrics = update(state, speed)
        return state, {"loss": loss, "norm": metrics.grad_norm, "speed": speed}

    step, state = fs.make_step(fn, plan), fs.init_state(plan, OPT, params=whole())
    speed = fs.tree.scale(grad(state, local(batch(0), plan))[1], 0.0)
    for number in range(3):
        given = {"rows": local(batch(number), plan), "speed": speed}
        state, metrics = step(state, given)
        speed = metrics["speed"]
        told.append([float(metrics["loss"]), float(metrics["norm"]), float(fs.tree.norm(speed, plan))])
    assert asks or step.record == step.schedule.ops
    return told


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_they_go_round() -> None:
    want = momentum(False)
    ranks = fs.virtual_mesh((3,), ("shard",)).run(lambda: momentum(False))  # shards of 3 ranks differ in their rows
    for told in (*ranks, momentum(True)):
        assert torch.tensor(told).allclose(torch.tensor(want), rtol=1e-9)
    assert want[2][1] == pytest.approx(want[2][2])


def test_the_batch_keeps_them() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    grad, update = fs.value_and_grad(first, plan), fs.make_update(OPT, plan)
    state = fs.init_state(plan, OPT, params=whole())
    given = fs.tree.scale(grad(state, batch(0))[1], 1.0)
    before = [leaf.clone() for leaf in tree.leaves(given)]
    state, _ = fs.make_step(lambda state, grads: (update(state, grads)[0], grad(state, batch(0))[0]), plan)(
        state, given
    )
    for leaf in tree.leaves(given):
        leaf.add_(1.0)  # the update waits, on values of its own
    want = fs.init_state(plan, OPT, params=whole())
    want, _ = update(want, tree.map(torch.clone, grad(want, batch(0))[1]))
    assert all(map(torch.equal, tree.leaves(state.params), tree.leaves(want.params)))
    assert all(
        torch.equal(leaf - 1.0, old) or torch.allclose(leaf - 1.0, old)
        for leaf, old in zip(tree.leaves(given), before, strict=True)
    )


def test_a_pass_takes_none() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    grad, update = fs.value_and_grad(first, plan), fs.make_update(OPT, plan)
    state = fs.init_state(plan, OPT, params=whole())
    given = grad(state, batch(0))[1]
    step = fs.make_step(lambda state, given: update(state, grad(state, {**batch(0), "grads": given})[1]), plan)
    with pytest.raises(fs.errors.BatchError, match="leaves of a tree of shards"):
        step(state, given)


def test_one_leaf_of_a_tree_is_a_copy() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    grad, update = fs.value_and_grad(first, plan), fs.make_update(OPT, plan)

    def fn(state: Any, given: Any) -> Any:
        _, grads = grad(state, given)
        return update(state, grads)[0], {"scale": grads["scale"]}

    step, state = fs.make_step(fn, plan), fs.init_state(plan, OPT, params=whole())
    want = grad(state, batch(0))[1]["scale"].clone()
    state, metrics = step(state, batch(0))
    step(state, batch(1))
    assert torch.equal(metrics["scale"], want)
