"""Training in bfloat16 equals the same casts in one plain process, for every program of the zoo.

The reference is plain PyTorch: for each rank's part of the batch the module is called with leaves that were cast, and
the gradients, which are bfloat16, are added up in float32, the dtype in which parameters are kept.
"""

import functools

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from tests.shared import reference, zoo
from tests.shared.reference import SGD
from tests.shared.workers import Pools

BF16 = fs.Precision(torch.bfloat16, torch.bfloat16)
STEPS = 10
POLICIES = {
    "default": (fs.Policy(), None),
    "lean": (fs.Policy(prefetch=0, reduces=1), None),
    "kept, graphs": (fs.Policy(prefetch=1, reshard=False), "fx"),
}


def narrow(batch: zoo.Batch) -> zoo.Batch:
    """A batch whose floating-point tensors are bfloat16, so that no product mixes dtypes."""
    return tree.map(lambda x: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def train(name: str, policies: list[str]) -> list[tuple[list[float], dict[str, Tensor], list[int]]]:
    """On a rank: for each policy losses, last parameters, and the steps whose record is not their schedule."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        for policy, compile in (POLICIES[word] for word in policies):
            example = zoo.build(name)
            plan = fs.make_plan(
                example.model, mesh, example.rules, batch=P("shard"), units=example.units, precision=BF16
            )
            opt = fs.optim.sgd(**SGD)
            step = fs.make_train_step(example.loss_fn, opt, plan, schedule=policy, compile=compile, debug=True)
            state = fs.init_state(plan, opt, params=example.params())
            losses, departures = [], []
            for number in range(STEPS):
                state, metrics = step(state, narrow(zoo.cut(example.batch(number), mesh.rank, mesh.size)))
                losses.append(float(metrics.loss))
                departures += [number] if step.record != step.schedule.ops else []
            out.append((losses, dict(tree.paths(fs.unshard(state.params, plan))), departures))
    return out


@functools.cache
def plain(name: str, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: losses and last parameters."""
    example = zoo.build(name)
    leaves = example.plain.parameters
    kept = {path: leaf.clone() for path, leaf in example.start.items()}
    trained = [path for path, leaf in leaves.items() if leaf.requires_grad]
    moments = {path: torch.zeros_like(kept[path]) for path in trained}
    losses = []
    for number in range(STEPS):
        parts = [narrow(zoo.cut(example.batch(number), rank, world)) for rank in range(world)]
        grads = {path: torch.zeros_like(kept[path]) for path in trained}
        values = []
        for part in parts:
            for path, leaf in leaves.items():
                leaf.data, leaf.grad = kept[path].bfloat16(), None
            value, share = _loss(example, part, parts)
            value.backward()
            values.append(value.item() * share)
            for path in trained:
                own = leaves[path].grad
                grads[path] += 0 if own is None else own.float() * share
        losses.append(sum(values))
        for path, grad in grads.items():
            grad += SGD["weight_decay"] * kept[path]
            moments[path] = SGD["momentum"] * moments[path] + grad
            kept[path] = kept[path] - SGD["lr"] * moments[path]
    return losses, kept


def _loss(example: zoo.Example, part: zoo.Batch, parts: list[zoo.Batch]) -> tuple[Tensor, float]:
    """The loss of a part of the batch, and what it counts; where tokens are masked, the sum over those that are not."""
    if "mask" not in part:
        return example.plain.loss(part), 1 / len(parts)
    mean, _ = example.loss_fn(tree.nest(example.plain.parameters), part)
    return mean.total, 1 / float(sum(other["mask"].sum() for other in parts))


RUNS = [
    pytest.param(name, world, words, marks=[pytest.mark.slow] if world == 4 else [])
    for name in sorted(zoo.EXAMPLES)
    for world, words in ((2, ["default"]), (4, list(POLICIES)))
]


@pytest.mark.parametrize(("name", "world", "words"), RUNS)
def test_training_in_bfloat16_equals_one_process(pool: Pools, name: str, world: int, words: list[str]) -> None:
    want, params = plain(name, world)
    for results in pool(world).run(train, name, words, timeout=110.0):
        for losses, whole, departures in results:
            assert not departures
            assert losses == pytest.approx(want, rel=2**-7)  # two units in the last place of what units compute
            for path, leaf in params.items():
                torch.testing.assert_close(whole[path], leaf, rtol=0, atol=2e-5, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_rounding_shows(name: str) -> None:
    """Another cast, or another cut of the batch, leads further away than a run may differ."""
    one, other = plain(name, 2)[1], plain(name, 4)[1]
    exact = reference.train(zoo.build(name), "sgd", None, STEPS).params
    for far in (other, exact):
        assert max(float((leaf - far[path]).abs().max()) for path, leaf in one.items()) > 1e-4
